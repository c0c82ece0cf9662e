package observe

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/host/internal/codec/choice"
	"github.com/kvhost/kvhost/host/internal/store"
)

// codecCollector exports what compression takes and gains, by direction and model.
type codecCollector struct {
	store                         *store.Store
	pages, stored, seconds, plain *prometheus.Desc
}

func newCodecCollector(s *store.Store) *codecCollector {
	desc := func(name, help, labels string) *prometheus.Desc {
		return prometheus.NewDesc("kvhost_"+name, help, strings.Fields(labels), nil)
	}
	return &codecCollector{
		store:   s,
		pages:   desc("codec_page_bytes_total", "Page bytes of extents that were compressed or decompressed.", "direction model"),
		stored:  desc("codec_stored_bytes_total", "Bytes that the same extents take in files.", "direction model"),
		seconds: desc("codec_seconds_total", "Time of the codec, on one core.", "direction model"),
		plain: desc("codec_plain_bytes_total",
			"Page bytes of pieces that were not compressed because it would not be worth it.", "model"),
	}
}

// Describe names the series.
func (c *codecCollector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect reads the counters.
func (c *codecCollector) Collect(ch chan<- prometheus.Metric) {
	for _, m := range c.store.Compression() {
		for _, way := range []struct {
			name string
			f    choice.Flow
		}{{"store", m.Encoded}, {"load", m.Decoded}} {
			ch <- prometheus.MustNewConstMetric(c.pages, counter, float64(way.f.Pages), way.name, m.Model)
			ch <- prometheus.MustNewConstMetric(c.stored, counter, float64(way.f.Stored), way.name, m.Model)
			ch <- prometheus.MustNewConstMetric(c.seconds, counter, way.f.Took.Seconds(), way.name, m.Model)
		}
		ch <- prometheus.MustNewConstMetric(c.plain, counter, float64(m.Plain), m.Model)
	}
}
