package observe

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/host/internal/budget"
)

// memoryCollector reads the budget of the host's memory when it is scraped.
type memoryCollector struct {
	figures              func(most int) budget.Figures
	limit, held, refused *prometheus.Desc
}

func newMemoryCollector(figures func(int) budget.Figures) *memoryCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvhost_"+name, help, labels, nil)
	}
	return &memoryCollector{
		figures: figures,
		limit:   desc("memory_limit_bytes", "The setting max_memory."),
		held:    desc("memory_bytes", "Memory held within max_memory.", "part"),
		refused: desc("memory_refusals_total", "Messages and sessions refused for their share of the memory."),
	}
}

// Describe sends the descriptions.
func (c *memoryCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.limit
	ch <- c.held
	ch <- c.refused
}

// Collect reads the figures.
func (c *memoryCollector) Collect(ch chan<- prometheus.Metric) {
	f := c.figures(0)
	ch <- prometheus.MustNewConstMetric(c.limit, gauge, float64(f.Limit))
	ch <- prometheus.MustNewConstMetric(c.refused, counter, float64(f.Refused))
	ch <- prometheus.MustNewConstMetric(c.held, gauge, float64(f.Own), "staging")
	for _, part := range slices.Sorted(maps.Keys(f.Parts)) {
		ch <- prometheus.MustNewConstMetric(c.held, gauge, float64(f.Parts[part]), part)
	}
}
