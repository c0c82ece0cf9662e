package observe

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Kinds of metrics.
const (
	counter = prometheus.CounterValue
	gauge   = prometheus.GaugeValue
)

// family is a metric. Its series differ in the values of its labels.
type family struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func counted(name, help, labels string) family { return newFamily(name, help, labels, counter) }
func gauged(name, help, labels string) family  { return newFamily(name, help, labels, gauge) }

func newFamily(name, help, labels string, kind prometheus.ValueType) family {
	return family{prometheus.NewDesc("kvhost_"+name, help, strings.Fields(labels), nil), kind}
}

// series receives what is scraped.
type series chan<- prometheus.Metric

// put sends one series. A label that is not UTF-8 would fail all of them.
func (s series) put(f family, v float64, labels ...string) {
	for i := range labels {
		labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
	}
	s <- prometheus.MustNewConstMetric(f.desc, f.kind, v, labels...)
}

// histogram sends a histogram of seconds. There is one bucket more than bounds, and none of them is cumulative.
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

// rows are metrics that are read from one kind of figures.
type rows[T any] []struct {
	name, help string
	kind       prometheus.ValueType
	value      func(*T) float64
}

func (r rows[T]) families(labels string) (list []family) {
	for _, m := range r {
		list = append(list, newFamily(m.name, m.help, labels, m.kind))
	}
	return list
}

// put sends a series of each of the rows.
func (r rows[T]) put(s series, families []family, of *T, labels ...string) {
	for i, m := range r {
		s.put(families[i], m.value(of), labels...)
	}
}

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
