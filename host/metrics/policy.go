package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/host/store"
)

type policyMetric struct {
	name, help string
	kind       prometheus.ValueType
	value      func(*store.PolicyStats) float64
}

// policyMetrics have one series per policy in use: evict by root, and of place also those whose files are still there.
var policyMetrics = []policyMetric{
	{"policy_calls_total", "Calls into a policy.", prometheus.CounterValue, func(p *store.PolicyStats) float64 { return float64(p.Calls) }},
	{"policy_records_total", "Records handed to a policy.", prometheus.CounterValue, func(p *store.PolicyStats) float64 { return float64(p.Records) }},
	{"policy_seconds_total", "Time spent in a policy.", prometheus.CounterValue, func(p *store.PolicyStats) float64 { return p.Time.Seconds() }},
	{"policy_fuel_total", "Fuel that a policy used, about one unit per instruction; 0 when native.", prometheus.CounterValue, func(p *store.PolicyStats) float64 { return float64(p.Fuel) }},
	{"policy_faults_total", "Faults of a policy.", prometheus.CounterValue, func(p *store.PolicyStats) float64 { return float64(p.Faults) }},
	{"policy_builtin", "1 while the host answers in the place of a module that failed.", prometheus.GaugeValue, func(p *store.PolicyStats) float64 { return truth(p.Builtin) }},
	{"policy_quarantined", "1 once a module is not started any more.", prometheus.GaugeValue, func(p *store.PolicyStats) float64 { return truth(p.Quarantine != nil) }},
	{"policy_since_seconds", "When a policy took its role, in seconds since 1970.", prometheus.GaugeValue, func(p *store.PolicyStats) float64 { return float64(p.Since.Unix()) }},
	{"policy_entries", "Entries whose files a place policy named.", prometheus.GaugeValue, func(p *store.PolicyStats) float64 { return float64(p.Files) }},
}

type shadowMetric struct {
	name, help string
	kind       prometheus.ValueType
	value      func(*store.ShadowStats) float64
}

// shadowMetrics have one series per policy on trial. The live hits are those of the same keys.
var shadowMetrics = []shadowMetric{
	{"shadow_keys_total", "Keys looked up that a shadow heard of.", prometheus.CounterValue, func(s *store.ShadowStats) float64 { return float64(s.Keys) }},
	{"shadow_hits_total", "Of those, keys that the shadow would have granted.", prometheus.CounterValue, func(s *store.ShadowStats) float64 { return float64(s.Hits) }},
	{"shadow_live_hits_total", "Of those, keys that were granted.", prometheus.CounterValue, func(s *store.ShadowStats) float64 { return float64(s.LiveHits) }},
	{"shadow_dropped_total", "Lookups, stores and ends of requests that the shadow was too slow to hear of.", prometheus.CounterValue, func(s *store.ShadowStats) float64 { return float64(s.Dropped) }},
	{"shadow_evictions_total", "Entries that it would have evicted.", prometheus.CounterValue, func(s *store.ShadowStats) float64 { return float64(s.Evictions) }},
	{"shadow_used_bytes", "Fill of the imaginary cache.", prometheus.GaugeValue, func(s *store.ShadowStats) float64 { return float64(s.Used) }},
	{"shadow_capacity_bytes", "Size of the imaginary cache.", prometheus.GaugeValue, func(s *store.ShadowStats) float64 { return float64(s.Capacity) }},
	{"shadow_seconds_total", "Time spent in the policy.", prometheus.CounterValue, func(s *store.ShadowStats) float64 { return s.Time.Seconds() }},
	{"shadow_failed", "1 once the policy has failed, which ends the trial.", prometheus.GaugeValue, func(s *store.ShadowStats) float64 { return truth(s.Err != nil) }},
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// policyLabels tell policies in use apart; state is "acting", or "replaced" for a place policy whose files are still there.
var policyLabels = []string{"role", "policy", "module", "digest", "root", "state"}

// ownCounter is told once for each module, whatever roles it has.
const ownCounter = "policy_counter"

type moduleCounter struct{ digest, counter string }

type policySeries struct {
	labels [6]string
	stats  store.PolicyStats
}

// series are the policies by their labels. A place policy that was replaced by itself, with other settings, is there once for
// each of them: those that are replaced are told together.
func series(list []store.PolicyStats) (out []policySeries) {
	for _, p := range list {
		state := "acting"
		if p.Replaced {
			state = "replaced"
		}
		labels := [6]string{p.Role.String(), p.Name, p.Module, p.Digest, p.Root, state}
		i := slices.IndexFunc(out, func(o policySeries) bool { return o.labels == labels })
		if i < 0 {
			out = append(out, policySeries{labels, p})
			continue
		}
		o := &out[i].stats
		o.Calls += p.Calls
		o.Records += p.Records
		o.Time += p.Time
		o.Fuel += p.Fuel
		o.Faults += p.Faults
		o.Files += p.Files
		o.Builtin = o.Builtin || p.Builtin
		if o.Quarantine == nil {
			o.Quarantine = p.Quarantine
		}
		if p.Since.After(o.Since) {
			o.Since = p.Since
		}
	}
	return out
}
