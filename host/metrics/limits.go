package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/host/server"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/transfer"
)

// limits are what a reload may have changed and no other metric shows, by the key of the configuration.
type limits struct {
	desc   *prometheus.Desc
	store  *store.Store
	engine *transfer.Engine
	server *server.Server
}

func newLimits(h *Host) *limits {
	return &limits{
		desc:  prometheus.NewDesc("kvhost_limit", "Limits that hold now, by their key in the configuration.", []string{"key"}, nil),
		store: h.Store, engine: h.Engine, server: h.Server,
	}
}

func (c *limits) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

func (c *limits) Collect(ch chan<- prometheus.Metric) {
	st, sv := c.store.Current(), c.server.Current()
	seconds := func(d time.Duration) float64 { return d.Seconds() }
	for key, v := range map[string]float64{
		"store.high_watermark": st.High, "store.low_watermark": st.Low,
		"move.bandwidth": float64(st.Moves.Bandwidth), "move.waiting": float64(st.Moves.Waiting),
		"move.shutdown": seconds(st.Moves.Shutdown), "engine.max_write_queue": seconds(c.engine.WriteQueue()),
		"session.lease_ttl": seconds(sv.LeaseTTL), "session.max_wait": seconds(sv.MaxWait),
		"session.max_sessions": float64(sv.Limits.Sessions), "session.max_keys": float64(sv.Limits.KeysPerLookup),
		"session.max_chunks": float64(sv.Limits.ChunksPerJob), "session.max_registered": float64(sv.Limits.ArenaBytes),
	} {
		ch <- prometheus.MustNewConstMetric(c.desc, gauge, v, key)
	}
}
