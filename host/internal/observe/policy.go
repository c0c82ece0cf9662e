package observe

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/store"
)

// policyMetrics have one series per policy in use: evict by root.
var policyMetrics = rows[store.PolicyStats]{
	{"policy_calls_total", "Calls into a policy.", counter, func(p *store.PolicyStats) float64 { return float64(p.Calls) }},
	{"policy_records_total", "Records handed to a policy.", counter, func(p *store.PolicyStats) float64 { return float64(p.Records) }},
	{"policy_seconds_total", "Time spent in a policy.", counter, func(p *store.PolicyStats) float64 { return p.Time.Seconds() }},
	{"policy_fuel_total", "Fuel that a policy used, about one unit per instruction; 0 when native.", counter,
		func(p *store.PolicyStats) float64 { return float64(p.Fuel) }},
	{"policy_faults_total", "Faults of a policy.", counter, func(p *store.PolicyStats) float64 { return float64(p.Faults) }},
	{"policy_builtin", "1 while the built-in policy answers for a module that failed.", gauge,
		func(p *store.PolicyStats) float64 { return boolean(p.Builtin) }},
	{"policy_quarantined", "1 once a module is not restarted any more.", gauge,
		func(p *store.PolicyStats) float64 { return boolean(p.Quarantine != nil) }},
	{"policy_memory_bytes", "Memory of a policy's instances; 0 when native.", gauge,
		func(p *store.PolicyStats) float64 { return float64(p.Memory) }},
	{"policy_since_timestamp_seconds", "When a policy took its role, in seconds since 1970.", gauge,
		func(p *store.PolicyStats) float64 { return float64(p.Since.Unix()) }},
}

// shadowMetrics have one series per shadow. The live hits are those of the same keys.
var shadowMetrics = rows[store.ShadowStats]{
	{"shadow_keys_total", "Keys looked up that a shadow received.", counter, func(s *store.ShadowStats) float64 { return float64(s.Keys) }},
	{"shadow_hits_total", "Of those, keys that the shadow would have granted.", counter,
		func(s *store.ShadowStats) float64 { return float64(s.Hits) }},
	{"shadow_live_hits_total", "Of those, keys that were granted.", counter,
		func(s *store.ShadowStats) float64 { return float64(s.LiveHits) }},
	{"shadow_dropped_total", "Lookups, stores and ends of requests that the shadow was too slow for.", counter,
		func(s *store.ShadowStats) float64 { return float64(s.Dropped) }},
	{"shadow_evictions_total", "Entries that the shadow would have evicted.", counter,
		func(s *store.ShadowStats) float64 { return float64(s.Evictions) }},
	{"shadow_used_bytes", "Bytes in the imaginary cache.", gauge, func(s *store.ShadowStats) float64 { return float64(s.Used) }},
	{"shadow_capacity_bytes", "Capacity of the imaginary cache.", gauge, func(s *store.ShadowStats) float64 { return float64(s.Capacity) }},
	{"shadow_seconds_total", "Time spent in the policy.", counter, func(s *store.ShadowStats) float64 { return s.Time.Seconds() }},
	{"shadow_memory_bytes", "Memory of the policy's instance; 0 when native.", gauge,
		func(s *store.ShadowStats) float64 { return float64(s.Memory) }},
	{"shadow_failed", "1 while the shadow is down after a fault.", gauge,
		func(s *store.ShadowStats) float64 { return boolean(s.Err != nil) }},
}

var (
	policyFamilies = policyMetrics.families("role policy module digest root")
	shadowFamilies = shadowMetrics.families("policy module digest")
	// moduleCounters are exported once for each module, whatever its roles.
	moduleCounters = newFamily("policy_counter", "Counters of a module.", "policy module digest counter", prometheus.UntypedValue)
	policiesMemory = gauged("policies_memory_bytes", "Memory of the instances of all policies, shadows included.", "")
	policiesLimit  = gauged("policies_memory_limit_bytes", "Memory that the instances of all policies may have.", "")
)

func collectPolicies(out series, st *store.Stats, memory *sandbox.MemoryBudget) {
	sent := map[moduleCounter]bool{}
	for _, p := range byLabels(st.Policies) {
		policyMetrics.put(out, policyFamilies, &p.stats, p.labels[:]...)
		for _, n := range slices.Sorted(maps.Keys(p.stats.Counters)) {
			if own := (moduleCounter{p.stats.Digest, n}); !sent[own] {
				sent[own] = true
				out.put(moduleCounters, float64(p.stats.Counters[n]), p.stats.Name, p.stats.Module, p.stats.Digest, n)
			}
		}
	}
	for i := range st.Shadows {
		p := &st.Shadows[i]
		shadowMetrics.put(out, shadowFamilies, p, p.Name, p.Module, p.Digest)
	}
	out.put(policiesMemory, float64(memory.Used()))
	out.put(policiesLimit, float64(memory.Limit()))
}

type moduleCounter struct{ digest, counter string }

type policySeries struct {
	labels [5]string
	stats  store.PolicyStats
}

// byLabels groups the policies by their labels: one that is bound several times is summed.
func byLabels(list []store.PolicyStats) (out []policySeries) {
	for _, p := range list {
		labels := [5]string{p.Role.String(), p.Name, p.Module, p.Digest, p.Root}
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
		o.Memory += p.Memory
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
