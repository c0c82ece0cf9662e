package observe

import (
	"runtime"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/host/internal/server"
	"github.com/kvhost/kvhost/host/internal/server/activity"
)

// clientCollector exports what clients wait for and ask for.
type clientCollector struct {
	server *server.Server

	seconds                    *prometheus.Desc
	keys, hits, loaded, stored *prometheus.Desc
}

func newClientCollector(s *server.Server) *clientCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvhost_"+name, help, labels, nil)
	}
	return &clientCollector{
		server:  s,
		seconds: desc("client_seconds", "Time from the receipt of a message to its answer.", "answer"),
		keys:    desc("model_lookup_keys_total", "Keys looked up.", "model", "tenant"),
		hits:    desc("model_lookup_hits_total", "Keys granted with a lease.", "model", "tenant"),
		loaded:  desc("model_loaded_bytes_total", "Bytes of pages delivered.", "model", "tenant"),
		stored:  desc("model_stored_bytes_total", "Bytes of pages published.", "model", "tenant"),
	}
}

// Describe sends nothing: the set of series depends on the sessions.
func (c *clientCollector) Describe(chan<- *prometheus.Desc) {}

// Collect reads the counters.
func (c *clientCollector) Collect(ch chan<- prometheus.Metric) {
	for _, l := range c.server.Latencies() {
		buckets, below := map[float64]uint64{}, uint64(0)
		for k, bound := range activity.Bounds {
			below += l.Buckets[k]
			buckets[bound] = below
		}
		ch <- prometheus.MustNewConstHistogram(c.seconds, l.Count, l.Sum.Seconds(), buckets, l.Answer.String())
	}
	for _, u := range c.server.Usage() {
		for _, m := range []struct {
			desc  *prometheus.Desc
			value uint64
		}{{c.keys, u.Keys.Load()}, {c.hits, u.Hits.Load()}, {c.loaded, u.LoadedBytes.Load()}, {c.stored, u.StoredBytes.Load()}} {
			ch <- prometheus.MustNewConstMetric(m.desc, counter, float64(m.value), u.Model, strconv.FormatUint(uint64(u.Tenant), 10))
		}
	}
}

// buildInfo is 1, with what the binary was made from as labels.
func buildInfo(version string) prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kvhost_build_info", Help: "1, labelled with the versions of kvhost and Go.",
		ConstLabels: prometheus.Labels{"version": version, "go": runtime.Version()},
	})
	g.Set(1)
	return g
}
