package observe

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// family is a metric. Its series differ in the values of their labels.
type family struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

var declared = []string{"build_info"}

// Names returns the names of all metrics, without kvhost_.
func Names() []string { return declared }

// newFamily returns a metric. It is a counter if its name ends like that of a counter.
func newFamily(name, help, labels string) family {
	declared = append(declared, name)
	kind := prometheus.GaugeValue
	if strings.HasSuffix(name, "_total") {
		kind = prometheus.CounterValue
	}
	return family{prometheus.NewDesc("kvhost_"+name, help, strings.Fields(labels), nil), kind}
}

// series receives the series of a scrape.
type series chan<- prometheus.Metric

// put sends one series. Labels are made valid UTF-8, because one that is not would make the whole scrape fail.
func (s series) put(f family, v float64, labels ...string) {
	for i := range labels {
		labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
	}
	s <- prometheus.MustNewConstMetric(f.desc, f.kind, v, labels...)
}

// histogram sends a histogram of seconds. There is one more bucket than bounds, and the counts are not cumulative.
func histogram[N int64 | uint64](s series, f family, seconds float64, bounds []float64, counts []N, labels ...string) {
	buckets, all := map[float64]uint64{}, uint64(0)
	for i, n := range counts {
		all += uint64(n)
		if i < len(bounds) {
			buckets[bounds[i]] = all
		}
	}
	s <- prometheus.MustNewConstHistogram(f.desc, all, seconds, buckets, labels...)
}
