package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/host/transfer"
)

// codecCollector exports what compression takes and gains, by direction.
type codecCollector struct {
	engine                 *transfer.Engine
	pages, stored, seconds *prometheus.Desc
}

func newCodecCollector(e *transfer.Engine) *codecCollector {
	desc := func(name, help, labels string) *prometheus.Desc {
		return prometheus.NewDesc("kvhost_"+name, help, strings.Fields(labels), nil)
	}
	return &codecCollector{
		engine:  e,
		pages:   desc("codec_page_bytes_total", "Page bytes of extents that were compressed or decompressed.", "direction"),
		stored:  desc("codec_stored_bytes_total", "Bytes that the same extents take in files.", "direction"),
		seconds: desc("codec_seconds_total", "Time of the codec, on one core.", "direction"),
	}
}

// Describe names the series.
func (c *codecCollector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect reads the counters.
func (c *codecCollector) Collect(ch chan<- prometheus.Metric) {
	stats := c.engine.Stats()
	for _, way := range []struct {
		name string
		s    transfer.CodecStats
	}{{"store", stats.Encoded}, {"load", stats.Decoded}} {
		ch <- prometheus.MustNewConstMetric(c.pages, counter, float64(way.s.Pages), way.name)
		ch <- prometheus.MustNewConstMetric(c.stored, counter, float64(way.s.Stored), way.name)
		ch <- prometheus.MustNewConstMetric(c.seconds, counter, way.s.Took.Seconds(), way.name)
	}
}
