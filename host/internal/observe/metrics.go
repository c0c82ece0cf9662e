package observe

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/peers"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/s3fs"
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
	{"stores_refused", "Chunks that the admit policy refused.", func(s *store.Stats, _ transfer.Stats) int64 { return int64(s.Refused) }},
	{"stored_files", "Piece files published.", func(_ *store.Stats, t transfer.Stats) int64 { return t.StoredFiles }},
	{"stored_bytes", "Bytes of piece files published.", func(_ *store.Stats, t transfer.Stats) int64 { return t.StoredBytes }},
	{"store_errors", "Pieces that failed to be stored.", func(_ *store.Stats, t transfer.Stats) int64 { return t.StoreErrors }},
	{"stores_shed", "Pieces that waited too long for their turn.", func(_ *store.Stats, t transfer.Stats) int64 { return t.StoresShed }},
	{"loaded_files", "Pieces delivered and verified.", func(_ *store.Stats, t transfer.Stats) int64 { return t.LoadedFiles }},
	{"loaded_bytes", "Bytes of piece files delivered and verified.", func(_ *store.Stats, t transfer.Stats) int64 { return t.LoadedBytes }},
	{"load_errors", "Pieces that failed to be loaded.",
		func(_ *store.Stats, t transfer.Stats) int64 { return t.LoadErrors }},
}

// ofShared reads a figure of a shared root; it is 0 for others.
func ofShared(value func(s *store.SharedStats) float64) func(*store.RootStats) float64 {
	return func(r *store.RootStats) float64 {
		if r.Shared == nil {
			return 0
		}
		return value(r.Shared)
	}
}

// rootMetrics have one series per root.
var rootMetrics = rows[store.RootStats]{
	{"root_capacity_bytes", "Configured limit.", gauge, func(r *store.RootStats) float64 { return float64(r.Capacity) }},
	{"root_used_bytes", "Allocated bytes of pieces, temporaries and quarantine.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Used) }},
	{"root_writing_bytes", "Bytes reserved by stores in flight.", gauge, func(r *store.RootStats) float64 { return float64(r.Writing) }},
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
		ofShared(func(s *store.SharedStats) float64 { return boolean(s.Evictor) })},
	{"root_shared_peers", "Other hosts of a shared root, including those that have just left.", gauge,
		ofShared(func(s *store.SharedStats) float64 { return float64(s.Peers) })},
	{"root_shared_state", "0: joining, nothing is served or stored; 1: admitted, the root is being scanned; 2: active.",
		gauge, ofShared(func(s *store.SharedStats) float64 { return float64(s.State) })},
	{"root_shared_credit_bytes", "Bytes that this host may write to a shared root before it needs more credit.", gauge,
		ofShared(func(s *store.SharedStats) float64 { return float64(s.Free) })},
	{"root_shared_credit_waits_total", "Times that a store found too little credit.", counter,
		ofShared(func(s *store.SharedStats) float64 { return float64(s.Refused) })},
	{"root_shared_outstanding_bytes", "Evictor: credit that hosts hold and have not reported as spent.", gauge,
		ofShared(func(s *store.SharedStats) float64 { return float64(s.Outside) })},
	{"root_shared_journal_batches", "Batches of pending evictions.", gauge,
		ofShared(func(s *store.SharedStats) float64 { return float64(s.Journal) })},
	{"root_shared_poll_seconds", "Time between this host's last two polls of the others.", gauge,
		ofShared(func(s *store.SharedStats) float64 { return s.Lag.Seconds() })},
	{"root_shared_removed_total", "Evictor: entries removed.", counter,
		ofShared(func(s *store.SharedStats) float64 { return float64(s.Removed) })},
	{"root_shared_vetoes_total", "Evictor: entries spared because a host had them leased.", counter,
		ofShared(func(s *store.SharedStats) float64 { return float64(s.Spared) })},
	{"root_shared_given_up_total", "Evictor: hosts declared dead.", counter,
		ofShared(func(s *store.SharedStats) float64 { return float64(s.GivenUp) })},
	{"root_compression_least_ratio", "Ratio of page bytes to stored bytes from which on chunks are compressed; +Inf: none is.", gauge,
		func(r *store.RootStats) float64 { return r.Least }},
	{"root_entries", "Entries in the index.", gauge, func(r *store.RootStats) float64 { return float64(r.Entries) }},
	{"root_index_bytes", "Memory of the index.", gauge, func(r *store.RootStats) float64 { return float64(r.IndexBytes) }},
	{"root_scanning", "1 while the scan at the start runs.", gauge, func(r *store.RootStats) float64 { return boolean(r.Scanning) }},
	{"root_scanned_files_total", "Files that the scan at the start has read.", counter,
		func(r *store.RootStats) float64 { return float64(r.Scanned) }},
	{"root_unscanned_bytes", "Upper bound of the bytes of files that the scan has not read yet.", gauge,
		func(r *store.RootStats) float64 { return float64(r.Unscanned) }},
	{"root_evictions_total", "Entries evicted.", counter, func(r *store.RootStats) float64 { return float64(r.Evictions) }},
	{"root_recycled_files_total", "Victims' files that stores overwrote instead of making new ones.", counter,
		func(r *store.RootStats) float64 { return float64(r.Recycled) }},
	{"root_sheds_total", "Stores that found no space.", counter, func(r *store.RootStats) float64 { return float64(r.Sheds) }},
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
	{"root_vanished_total", "Files removed by another program.", counter, func(r *store.RootStats) float64 { return float64(r.Vanished) }},
	{"root_sync_failures_total", "Pieces dropped because a sync failed.", counter,
		func(r *store.RootStats) float64 { return float64(r.SyncFails) }},
	{"root_bad_victims_total", "Victims named by the policy that could not be evicted.", counter,
		func(r *store.RootStats) float64 { return float64(r.BadVictims) }},
	{"root_unanswered_total", "Questions to which the policy named no entry that can go, although one could.", counter,
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
	// Buckets are those of roots, by path.
	Buckets map[string]*s3fs.FS
	Peers   *peers.Peers // nil when off
	// PolicyMemory is what the instances of all policies have and may have.
	PolicyMemory *sandbox.MemoryBudget
	Version      string
	Spans        *spans.Tracer
	Reloads      *Reloads
	// Certificates says when they end, by the settings that name them.
	Certificates func() map[string]time.Time
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

// Series of the host as a whole.
var (
	wholeHost = func() (list []family) {
		for _, m := range counters {
			list = append(list, counted(m.name+"_total", m.help, ""))
		}
		return list
	}()
	rootFamilies = rootMetrics.families("root")
	sessions     = gauged("sessions", "Client sessions.", "")
	leases       = gauged("leases", "Leases held.", "")
	slots        = gauged("staging_slots", "Staging slots by state.", "state")
	rootMemory   = gauged("root_memory_bytes", "Memory of a root in memory: used and free are there, pending is to come.", "root state")
	requests     = counted("bucket_requests_total", "Requests to the server of a root in a bucket; result is ok or error.", "root request result")
	requestBytes = counted("bucket_bytes_total", "Bytes of objects from (read) and to (write) the server of a root in a bucket.", "root direction")
	bucketCost   = gauged("bucket_cost_per_day",
		"What a day like the time since the start costs at the root's prices, for requests, for bytes read and for what is stored.", "root for")
	spanResults = counted("otlp_spans_total",
		"Spans of requests: exported; dropped, as the queue was full; failed, as the collector did not take them.", "result")
)

// collector reads the host's figures when it is scraped.
type collector struct{ *Host }

// Describe sends nothing: the set of series depends on roots, GPUs, sessions and policies, so the collector is unchecked.
func (collector) Describe(chan<- *prometheus.Desc) {}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	out := series(ch)
	st, ts, ss := c.Store.Stats(), c.Engine.Stats(), c.Server.Stats()
	for i, m := range counters {
		out.put(wholeHost[i], float64(m.value(&st, ts)))
	}
	used := map[string]int64{}
	for i := range st.Roots {
		used[st.Roots[i].Path] = st.Roots[i].Used
		rootMetrics.put(out, rootFamilies, &st.Roots[i], st.Roots[i].Path)
	}
	for path, fsys := range c.Buckets {
		s := fsys.Stats()
		for kind, n := range s.Requests {
			failed := s.Failed[kind]
			out.put(requests, float64(n-failed), path, kind.String(), "ok")
			out.put(requests, float64(failed), path, kind.String(), "error")
		}
		out.put(requestBytes, float64(s.Read), path, "read")
		out.put(requestBytes, float64(s.Written), path, "write")
		if cost, known := fsys.Cost(used[path]); known {
			out.put(bucketCost, cost.Requests, path, "requests")
			out.put(bucketCost, cost.Read, path, "read")
			out.put(bucketCost, cost.Stored, path, "stored")
		}
	}
	for path, fsys := range c.Memory {
		m := fsys.Stats()
		out.put(rootMemory, float64(m.Used), path, "used")
		out.put(rootMemory, float64(m.Ready-m.Used), path, "free")
		out.put(rootMemory, float64(m.Wanted-m.Ready), path, "pending")
	}
	if c.Spans != nil {
		s := c.Spans.Stats()
		out.put(spanResults, float64(s.Exported), "exported")
		out.put(spanResults, float64(s.Dropped), "dropped")
		out.put(spanResults, float64(s.Failed), "failed")
	}
	if c.Certificates != nil {
		for setting, end := range c.Certificates() {
			out.put(certificateEnd, float64(end.Unix()), setting)
		}
	}
	if c.Reloads != nil {
		c.Reloads.collect(out)
	}
	out.put(sessions, float64(ss.Sessions))
	out.put(leases, float64(ss.Leases))
	out.put(slots, float64(ts.SlotsInUse), "used")
	out.put(slots, float64(ts.Slots-ts.SlotsInUse), "free")
	collectLevels(out, &st)
	collectPolicies(out, &st, c.PolicyMemory)
	collectTransfers(out, c.Engine, c.GPUs)
	collectCodec(out, c.Store)
	collectClients(out, c.Server)
	collectPeers(out, c.Peers)
	collectBudgets(out, c.Server.Budgets(0))
}

// NewRegistry returns a registry with all metrics of a host, of Go and of the process.
func NewRegistry(h Host) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collector{&h}, buildInfo(h.Version), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}
