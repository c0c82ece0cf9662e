package observe

import (
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/host/internal/server"
)

// What clients wait for and ask for.
var (
	clientSeconds = gauged("client_seconds", "Time from the receipt of a message to its answer.", "answer")
	modelKeys     = counted("model_lookup_keys_total", "Keys looked up.", "model tenant")
	modelHits     = counted("model_lookup_hits_total", "Keys granted with a lease.", "model tenant")
	modelLoaded   = counted("model_loaded_bytes_total", "Bytes of pages delivered.", "model tenant")
	modelStored   = counted("model_stored_bytes_total", "Bytes of pages published.", "model tenant")
	modelPaused   = counted("model_paused_seconds_total", "Time that sessions waited because the tenant has half of the processors among others.", "model tenant")
)

func collectClients(out series, s *server.Server) {
	for _, l := range s.Latencies() {
		histogram(out, clientSeconds, l.Sum.Seconds(), server.LatencyBounds[:], l.Buckets[:], l.Answer.String())
	}
	for _, u := range s.Usage() {
		tenant := strconv.FormatUint(uint64(u.Tenant), 10)
		out.put(modelKeys, float64(u.Keys.Load()), u.Model, tenant)
		out.put(modelHits, float64(u.Hits.Load()), u.Model, tenant)
		out.put(modelLoaded, float64(u.LoadedBytes.Load()), u.Model, tenant)
		out.put(modelStored, float64(u.StoredBytes.Load()), u.Model, tenant)
		out.put(modelPaused, time.Duration(u.Paused.Load()).Seconds(), u.Model, tenant)
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
