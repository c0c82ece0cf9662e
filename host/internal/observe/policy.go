package observe

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
)

const policyLabels = "role policy module digest root"

// ofPolicy has the figures that policies and shadows have in common in the status. Its series are those of policies in use,
// with a series for each root of an evict policy.
var ofPolicy = of[policy.Stats](policyLabels,
	figure{"Calls", "policy_calls_total", "calls", "Calls into a policy."},
	figure{from: "Records", status: "records"},
	figure{"Time", "policy_seconds_total", "time", "Time spent in a policy."},
	figure{from: "Fuel", status: "fuel"},
	figure{"Faults", "policy_faults_total", "faults", "Faults of a policy."},
	figure{"Memory", "policy_memory_bytes", "memory", "Memory of a policy's instances; 0 when native."},
)

var ofPolicyInUse = of[store.PolicyStats](policyLabels,
	figure{"Builtin", "policy_builtin", "", "1 while the built-in policy answers for a module that failed."},
	figure{"Quarantine", "policy_quarantined", "", "1 once a module is not restarted any more."},
	figure{from: "Since", status: "since"},
)

// ofShadow has the series of shadows, and the fields of their trial in the status.
var ofShadow = of[store.ShadowStats]("policy module digest",
	figure{"Keys", "shadow_keys_total", "keys", "Keys looked up that a shadow received."},
	figure{"Hits", "shadow_hits_total", "hits", "Of those, keys that the shadow would have granted."},
	figure{"LiveHits", "shadow_live_hits_total", "live_hits", "Of those, keys that were granted."},
	figure{"Err", "shadow_failed", "", "1 while the shadow is down after a fault."},
	figure{from: "Dropped", status: "dropped"},
	figure{from: "Capacity", status: "capacity"},
	figure{from: "Used", status: "used"},
)

var (
	// moduleCounters are exported once for each module, regardless of its roles.
	moduleCounters = family{newFamily("policy_counter", "Counters of a module.", "policy module digest counter").desc, prometheus.UntypedValue}
	policiesMemory = newFamily("policies_memory_bytes", "Memory of the instances of all policies, shadows included.", "")
	policiesLimit  = newFamily("policies_memory_limit_bytes", "Memory that the instances of all policies may have.", "")
)

func collectPolicies(out series, st *store.Stats, memory *sandbox.MemoryBudget) {
	sent := map[moduleCounter]bool{}
	for _, p := range byLabels(st.Policies) {
		ofPolicy.put(out, &p.stats.Stats, p.labels[:]...)
		ofPolicyInUse.put(out, &p.stats, p.labels[:]...)
		for _, n := range slices.Sorted(maps.Keys(p.stats.Counters)) {
			if own := (moduleCounter{p.stats.Digest, n}); !sent[own] {
				sent[own] = true
				out.put(moduleCounters, float64(p.stats.Counters[n]), p.stats.Name, p.stats.Module, p.stats.Digest, n)
			}
		}
	}
	for i := range st.Shadows {
		p := &st.Shadows[i]
		ofShadow.put(out, p, p.Name, p.Module, p.Digest)
	}
	out.put(policiesMemory, float64(memory.Used()))
	out.put(policiesLimit, float64(memory.Limit()))
}

type moduleCounter struct{ digest, counter string }

type policySeries struct {
	labels [5]string
	stats  store.PolicyStats
}

// byLabels groups the policies by their labels, and adds up policies with the same labels.
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

func policyStatus(p *store.PolicyStats) *proto.PolicyStatus {
	out := statusOf(&p.Stats)
	ofPolicyInUse.fill(out, p)
	out.Name, out.Version, out.Root, out.State = p.Name, p.Version, p.Root, proto.PolicyState_POLICY_STATE_ACTING
	switch {
	case p.Quarantine != nil:
		out.State, out.Reason = proto.PolicyState_POLICY_STATE_QUARANTINE, p.Quarantine.Error()
	case p.Builtin:
		out.State = proto.PolicyState_POLICY_STATE_STANDIN
	}
	return out
}

func shadowStatus(p *store.ShadowStats) *proto.PolicyStatus {
	out := statusOf(&p.Stats.Stats)
	out.Name, out.Version, out.Since = p.Name, p.Version, timestamppb.New(p.Since)
	out.State, out.Entries, out.Trial = proto.PolicyState_POLICY_STATE_SHADOW, uint64(p.Entries), &proto.Trial{}
	if p.Err != nil {
		out.State, out.Reason = proto.PolicyState_POLICY_STATE_QUARANTINE, p.Err.Error()
	}
	ofShadow.fill(out.Trial, p)
	return out
}

func statusOf(p *policy.Stats) *proto.PolicyStatus {
	out := &proto.PolicyStatus{Role: proto.Value[proto.PolicyRole](p.Role.String()), Module: p.Module, Digest: Digest(p.Digest)}
	ofPolicy.fill(out, p)
	return out
}

// Digest returns the digest of a module. It is empty for a built-in policy.
func Digest(digest string) string {
	if digest == "native" {
		return ""
	}
	return digest
}
