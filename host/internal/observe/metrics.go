package observe

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/server"
	"github.com/kvhost/kvhost/host/internal/spans"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// counters are the whole-host counts. Status has them under their name, and /metrics as kvhost_<name>_total.
var counters = []struct {
	name, help string
	value      func(*store.Stats, transfer.Stats) int64
}{
	{"lookups", "LOOKUP messages answered.", func(s *store.Stats, _ transfer.Stats) int64 { return int64(s.Lookups) }},
	{"lookup_keys", "Keys looked up.", func(s *store.Stats, _ transfer.Stats) int64 { return int64(s.Keys) }},
	{"lookup_hits", "Keys granted with a lease.", func(s *store.Stats, _ transfer.Stats) int64 { return int64(s.Hits) }},
	{"stores_resident", "Chunks offered that were resident already.",
		func(s *store.Stats, _ transfer.Stats) int64 { return int64(s.Resident) }},
	{"stores_refused", "Chunks that the admit policy refused.",
		func(s *store.Stats, _ transfer.Stats) int64 { return int64(s.Refused) }},
	{"stored_files", "Piece files published.", func(_ *store.Stats, t transfer.Stats) int64 { return t.StoredFiles }},
	{"stored_bytes", "Bytes of piece files published.",
		func(_ *store.Stats, t transfer.Stats) int64 { return t.StoredBytes }},
	{"store_errors", "Pieces that failed to be stored.",
		func(_ *store.Stats, t transfer.Stats) int64 { return t.StoreErrors }},
	{"stores_shed", "Pieces that waited too long for their turn.",
		func(_ *store.Stats, t transfer.Stats) int64 { return t.StoresShed }},
	{"loaded_files", "Pieces delivered and verified.",
		func(_ *store.Stats, t transfer.Stats) int64 { return t.LoadedFiles }},
	{"loaded_bytes", "Bytes of piece files delivered and verified.",
		func(_ *store.Stats, t transfer.Stats) int64 { return t.LoadedBytes }},
	{"load_errors", "Pieces that failed to be loaded.",
		func(_ *store.Stats, t transfer.Stats) int64 { return t.LoadErrors }},
}

// Kinds of metrics.
const (
	counter = prometheus.CounterValue
	gauge   = prometheus.GaugeValue
)

type rootMetric struct {
	name, help string
	kind       prometheus.ValueType
	value      func(*store.RootStats) float64
}

// shared reads a figure of a shared root; it is 0 for others.
func shared(value func(s *store.SharedStats) float64) func(*store.RootStats) float64 {
	return func(r *store.RootStats) float64 {
		if r.Shared == nil {
			return 0
		}
		return value(r.Shared)
	}
}

// rootMetrics have one series per root.
var rootMetrics = []rootMetric{
	{"root_capacity_bytes", "Configured limit.", gauge, func(r *store.RootStats) float64 { return float64(r.Capacity) }},
	{"root_used_bytes", "Allocated bytes of pieces, temporaries and quarantine.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Used) }},
	{"root_writing_bytes", "Bytes reserved by stores in flight.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Writing) }},
	{"root_quarantine_bytes", "Bytes of damaged files kept for inspection.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Held) }},
	{"root_state", "0: in use; 1: full, stores only where no other root takes them; 2: read-only; 3: out of service.",
		gauge, func(r *store.RootStats) float64 { return float64(r.State) }},
	{"root_outages_total", "Times that the root went out of service.", counter,
		func(r *store.RootStats) float64 { return float64(r.Outages) }},
	{"root_stuck_operations", "Operations that took longer than store.io_timeout and have not ended.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Stuck) }},
	{"root_orphan_bytes", "Bytes of files that could not be removed; the removal is retried.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Orphaned) }},
	{"root_shared_evictor", "1 while this host is the evictor of a shared root.", gauge,
		shared(func(s *store.SharedStats) float64 { return boolean(s.Evictor) })},
	{"root_shared_peers", "Other hosts of a shared root, including those that have just left.", gauge,
		shared(func(s *store.SharedStats) float64 { return float64(s.Peers) })},
	{"root_shared_state", "0: joining, nothing is served or stored; 1: admitted, the root is being scanned; 2: active.",
		gauge, shared(func(s *store.SharedStats) float64 { return float64(s.State) })},
	{"root_shared_credit_bytes", "Bytes that this host may write to a shared root before it needs more credit.", gauge,
		shared(func(s *store.SharedStats) float64 { return float64(s.Free) })},
	{"root_shared_credit_waits_total", "Times that a store found too little credit.", counter,
		shared(func(s *store.SharedStats) float64 { return float64(s.Refused) })},
	{"root_shared_outstanding_bytes", "Evictor: credit that hosts hold and have not reported as spent.", gauge,
		shared(func(s *store.SharedStats) float64 { return float64(s.Outside) })},
	{"root_shared_journal_batches", "Batches of pending evictions.", gauge,
		shared(func(s *store.SharedStats) float64 { return float64(s.Journal) })},
	{"root_shared_poll_seconds", "Time between this host's last two polls of the others.", gauge,
		shared(func(s *store.SharedStats) float64 { return s.Lag.Seconds() })},
	{"root_shared_removed_total", "Evictor: entries removed.", counter,
		shared(func(s *store.SharedStats) float64 { return float64(s.Removed) })},
	{"root_shared_vetoes_total", "Evictor: entries spared because a host had them leased.", counter,
		shared(func(s *store.SharedStats) float64 { return float64(s.Spared) })},
	{"root_shared_given_up_total", "Evictor: hosts declared dead.", counter,
		shared(func(s *store.SharedStats) float64 { return float64(s.GivenUp) })},
	{"root_compression_least_ratio", "Ratio of page bytes to stored bytes from which on chunks are compressed; +Inf: none is.", gauge,
		func(r *store.RootStats) float64 { return r.Least }},
	{"root_entries", "Entries in the index.", gauge, func(r *store.RootStats) float64 { return float64(r.Entries) }},
	{"root_index_bytes", "Memory of the index.", gauge, func(r *store.RootStats) float64 { return float64(r.IndexBytes) }},
	{"root_scanning", "1 while the scan at the start runs.", gauge,
		func(r *store.RootStats) float64 { return boolean(r.Scanning) }},
	{"root_scanned_files_total", "Files that the scan at the start has read.", counter,
		func(r *store.RootStats) float64 { return float64(r.Scanned) }},
	{"root_unscanned_bytes", "Upper bound of the bytes of files that the scan has not read yet.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Unscanned) }},
	{"root_evictions_total", "Entries evicted.", counter, func(r *store.RootStats) float64 { return float64(r.Evictions) }},
	{"root_recycled_files_total", "Victims' files that stores overwrote instead of making new ones.", counter,
		func(r *store.RootStats) float64 { return float64(r.Recycled) }},
	{"root_sheds_total", "Stores that found no space.", counter,
		func(r *store.RootStats) float64 { return float64(r.Sheds) }},
	{"root_limit_bytes", "Bytes that the root may use now: less than its capacity if the file system has less.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Limit) }},
	{"root_expired_total", "Entries removed because they expired.", counter,
		func(r *store.RootStats) float64 { return float64(r.Expired) }},
	{"root_discarded_total", "Entries removed because a client discarded them.", counter,
		func(r *store.RootStats) float64 { return float64(r.Discarded) }},
	{"root_written_today_bytes", "Bytes counted against the daily write budget; 0 without one.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Written) }},
	{"root_budget_refusals_total", "Stores refused because of the daily write budget.", counter,
		func(r *store.RootStats) float64 { return float64(r.OverBudget) }},
	{"root_damaged_total", "Entries dropped because a file was damaged.", counter,
		func(r *store.RootStats) float64 { return float64(r.Damaged) }},
	{"root_vanished_total", "Files removed by another program.", counter,
		func(r *store.RootStats) float64 { return float64(r.Vanished) }},
	{"root_sync_failures_total", "Pieces dropped because a sync failed.", counter,
		func(r *store.RootStats) float64 { return float64(r.SyncFails) }},
	{"root_bad_victims_total", "Victims named by the policy that could not be evicted.", counter,
		func(r *store.RootStats) float64 { return float64(r.BadVictims) }},
	{"root_unanswered_total", "Questions in which the policy named nobody who can go, although somebody could.", counter,
		func(r *store.RootStats) float64 { return float64(r.Unanswered) }},
	{"root_place_faults_total", "Paths that held another key's file.", counter,
		func(r *store.RootStats) float64 { return float64(r.PlaceFaults) }},
	{"root_evict_faults_total", "Evict policies replaced after a fault.", counter,
		func(r *store.RootStats) float64 { return float64(r.EvictFaults) }},
}

// Host is what the metrics are read from.
type Host struct {
	Store  *store.Store
	Engine *transfer.Engine
	Server *server.Server
	GPUs   []*gds.GPU
	Memory map[string]*memfs.FS // of roots in memory, by path
	// PolicyMemory is what the instances of all policies have and may have.
	PolicyMemory *sandbox.MemoryBudget
	Version      string
	Spans        *spans.Tracer
}

// Counters are the whole-host counts by name, for the Status call.
func Counters(st *store.Stats, t transfer.Stats) map[string]uint64 {
	out := map[string]uint64{}
	for _, m := range counters {
		out[m.name] = uint64(m.value(st, t))
	}
	levelCounters(st, out)
	return out
}

// collector reads the host's counters when it is scraped.
type collector struct {
	host     *Host
	counters []*prometheus.Desc
	roots    []*prometheus.Desc
	policy   map[string]*prometheus.Desc
	sessions *prometheus.Desc
	leases   *prometheus.Desc
	slots    *prometheus.Desc
	memory   *prometheus.Desc
	taken    *prometheus.Desc // memory of all policies
	allowed  *prometheus.Desc
	spans    *prometheus.Desc
}

func newCollector(h *Host) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvhost_"+name, help, labels, nil)
	}
	c := &collector{
		host:     h,
		sessions: desc("sessions", "Client sessions."),
		leases:   desc("leases", "Leases held."),
		slots:    desc("staging_slots", "Staging slots by state.", "state"),
		policy:   map[string]*prometheus.Desc{},
	}
	c.memory = desc("root_memory_bytes", "Memory of a root in memory: used and free are there, pending is to come.",
		"root", "state")
	c.spans = desc("otlp_spans_total", "Spans of requests: exported; dropped, as the queue was full; failed, as the collector did not take them.",
		"result")
	c.taken = desc("policies_memory_bytes", "Memory of the instances of all policies, shadows included.")
	c.allowed = desc("policies_memory_limit_bytes", "Memory that the instances of all policies may have.")
	for _, m := range shadowMetrics {
		c.policy[m.name] = desc(m.name, m.help, "policy", "module", "digest")
	}
	c.policy[ownCounter] = desc(ownCounter, "Counters of a module.", "policy", "module", "digest", "counter")
	for _, m := range policyMetrics {
		c.policy[m.name] = desc(m.name, m.help, policyLabels...)
	}
	for _, m := range counters {
		c.counters = append(c.counters, desc(m.name+"_total", m.help))
	}
	for _, m := range rootMetrics {
		c.roots = append(c.roots, desc(m.name, m.help, "root"))
	}
	return c
}

// Describe sends nothing: the set of series depends on roots and policies, so the collector is unchecked.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// Collect reads the counters.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	st, ts, ss := c.host.Store.Stats(), c.host.Engine.Stats(), c.host.Server.Stats()
	for i, m := range counters {
		send(c.counters[i], prometheus.CounterValue, float64(m.value(&st, ts)))
	}
	for i := range st.Roots {
		for k, m := range rootMetrics {
			send(c.roots[k], m.kind, m.value(&st.Roots[i]), st.Roots[i].Path)
		}
	}
	collectLevels(ch, &st)
	sent := map[moduleCounter]bool{}
	for _, p := range series(st.Policies) {
		for _, m := range policyMetrics {
			send(c.policy[m.name], m.kind, m.value(&p.stats), p.labels[:]...)
		}
		for _, n := range slices.Sorted(maps.Keys(p.stats.Counters)) {
			if own := (moduleCounter{p.stats.Digest, n}); !sent[own] {
				sent[own] = true
				send(c.policy[ownCounter], prometheus.UntypedValue, float64(p.stats.Counters[n]), p.stats.Name, p.stats.Module,
					p.stats.Digest, n)
			}
		}
	}
	for i := range st.Shadows {
		p := &st.Shadows[i]
		for _, m := range shadowMetrics {
			send(c.policy[m.name], m.kind, m.value(p), p.Name, p.Module, p.Digest)
		}
	}
	send(c.taken, prometheus.GaugeValue, float64(c.host.PolicyMemory.Used()))
	send(c.allowed, prometheus.GaugeValue, float64(c.host.PolicyMemory.Limit()))
	for path, fsys := range c.host.Memory {
		m := fsys.Stats()
		send(c.memory, prometheus.GaugeValue, float64(m.Used), path, "used")
		send(c.memory, prometheus.GaugeValue, float64(m.Ready-m.Used), path, "free")
		send(c.memory, prometheus.GaugeValue, float64(m.Wanted-m.Ready), path, "pending")
	}
	if c.host.Spans != nil {
		s := c.host.Spans.Stats()
		send(c.spans, prometheus.CounterValue, float64(s.Exported), "exported")
		send(c.spans, prometheus.CounterValue, float64(s.Dropped), "dropped")
		send(c.spans, prometheus.CounterValue, float64(s.Failed), "failed")
	}
	send(c.sessions, prometheus.GaugeValue, float64(ss.Sessions))
	send(c.leases, prometheus.GaugeValue, float64(ss.Leases))
	send(c.slots, prometheus.GaugeValue, float64(ts.SlotsInUse), "used")
	send(c.slots, prometheus.GaugeValue, float64(ts.Slots-ts.SlotsInUse), "free")
}

// NewRegistry returns a registry with all metrics of a host, of Go and of the process.
func NewRegistry(h Host) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(newCollector(&h), newTransferCollector(h.Engine, h.GPUs), newCodecCollector(h.Store),
		newClientCollector(h.Server), buildInfo(h.Version), newMemoryCollector(h.Server.Memory), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}
