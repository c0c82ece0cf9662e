package observe

import (
	"runtime"
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

// Host holds the sources of the figures.
type Host struct {
	Store  *store.Store
	Engine *transfer.Engine
	Server *server.Server
	GPUs   []*gds.GPU
	Memory map[string]*memfs.FS // memory of roots in memory, by path
	// Buckets are the file systems of roots in buckets, by path.
	Buckets map[string]*s3fs.FS
	Peers   *peers.Peers // nil if there are no peers
	// PolicyMemory is the memory of the instances of all policies, with its limit.
	PolicyMemory *sandbox.MemoryBudget
	Version      string
	Spans        *spans.Tracer
	Reloads      *Reloads
	// Certificates returns the ends of certificates, by the settings that name them.
	Certificates func() map[string]time.Time
}

// totals are the statistics of the host as a whole.
type totals struct {
	Store  *store.Stats
	Engine *transfer.Stats
}

var wholeHost = of[totals]("",
	figure{"Store.Lookups", "lookups_total", "lookups", "LOOKUP messages answered."},
	figure{"Store.Keys", "lookup_keys_total", "lookup_keys", "Keys looked up."},
	figure{"Store.Hits", "lookup_hits_total", "lookup_hits", "Keys granted with a lease."},
	figure{"Store.Resident", "stores_resident_total", "stores_resident", "Chunks offered that were resident already."},
	figure{"Store.Refused", "stores_refused_total", "stores_refused", "Chunks that the admit policy refused."},
	figure{"Engine.StoredFiles", "stored_files_total", "stored_files", "Piece files published."},
	figure{"Engine.StoredBytes", "stored_bytes_total", "stored_bytes", "Bytes of piece files published."},
	figure{"Engine.StoreErrors", "store_errors_total", "store_errors", "Pieces that failed to be stored."},
	figure{"Engine.StoresShed", "stores_shed_total", "stores_shed", "Pieces that waited too long for their turn."},
	figure{"Engine.LoadedFiles", "loaded_files_total", "loaded_files", "Pieces delivered and verified."},
	figure{"Engine.LoadedBytes", "loaded_bytes_total", "loaded_bytes", "Bytes of piece files delivered and verified."},
	figure{"Engine.LoadErrors", "load_errors_total", "load_errors", "Pieces that failed to be loaded."},
)

var ofServer = of[server.Stats]("",
	figure{"Sessions", "sessions", "", "Client sessions."},
	figure{"Leases", "leases", "", "Leases held."},
)

var (
	slots       = newFamily("staging_slots", "Staging slots by state.", "state")
	spanResults = newFamily("otlp_spans_total",
		"Spans of requests: exported; dropped, as the queue was full; failed, as the collector did not take them.", "result")
)

// collector reads the host's figures when it is scraped.
type collector struct{ *Host }

// Describe sends nothing. The set of series depends on roots, GPUs, sessions and policies, so the collector is unchecked.
func (collector) Describe(chan<- *prometheus.Desc) {}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	out := series(ch)
	st, ts, ss := c.Store.Stats(), c.Engine.Stats(), c.Server.Stats()
	wholeHost.put(out, &totals{&st, &ts})
	ofServer.put(out, &ss)
	out.put(slots, float64(ts.SlotsInUse), "used")
	out.put(slots, float64(ts.Slots-ts.SlotsInUse), "free")
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
	c.collectRoots(out, &st)
	collectLevels(out, &st)
	collectPolicies(out, &st, c.PolicyMemory)
	collectTransfers(out, c.Engine, c.GPUs)
	collectCodec(out, c.Store)
	collectClients(out, c.Server)
	collectPeers(out, c.Peers)
	collectBudgets(out, c.Server.Budgets(0))
}

// buildInfo returns a metric with the value 1 and the properties of the binary as labels.
func buildInfo(version string) prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kvhost_build_info", Help: "1, labelled with the versions of kvhost and Go.",
		ConstLabels: prometheus.Labels{"version": version, "go": runtime.Version()},
	})
	g.Set(1)
	return g
}

// Registry returns a registry with all metrics of a host, of Go and of the process.
func (h *Host) Registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collector{h}, buildInfo(h.Version), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}
