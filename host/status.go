package host

import (
	"time"

	"github.com/kvhost/kvhost/host/metrics"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/store"
)

// Status is the part of the Status call that the server cannot answer itself.
func (h *Host) Status() *proto.StatusReply {
	st := h.store.Stats()
	policies := h.policies.Memory()
	out := &proto.StatusReply{PolicyMemory: policies.Used(), PolicyMemoryLimit: policies.Limit()}
	for i := range st.Policies {
		out.Policies = append(out.Policies, policyStatus(&st.Policies[i]))
	}
	for i := range st.Shadows {
		out.Policies = append(out.Policies, shadowStatus(&st.Shadows[i]))
	}
	for _, r := range st.Roots {
		out.Roots = append(out.Roots, &proto.RootStatus{
			Path: r.Path, Capacity: uint64(r.Capacity), Used: uint64(r.Used), Entries: uint64(r.Entries),
		})
	}
	out.Counters = metrics.Counters(&st, h.engine.Stats())
	memory := h.server.Memory(0)
	out.Counters["memory_limit_bytes"], out.Counters["memory_refusals"] = uint64(memory.Limit), memory.Refused
	out.Counters["memory_bytes"] = uint64(memory.Own + memory.Held)
	return out
}

func policyStatus(p *store.PolicyStats) *proto.PolicyStatus {
	out := statusOf(&p.Stats, p.Name, p.Version, p.Since)
	out.Root, out.Entries = p.Root, uint64(p.Files)
	switch {
	case p.Quarantine != nil:
		out.State, out.Reason = proto.PolicyState_POLICY_STATE_QUARANTINE, p.Quarantine.Error()
	case p.Builtin:
		out.State = proto.PolicyState_POLICY_STATE_STANDIN
	case p.Replaced:
		out.State = proto.PolicyState_POLICY_STATE_DRAINING
	}
	return out
}

func shadowStatus(p *store.ShadowStats) *proto.PolicyStatus {
	out := statusOf(&p.Stats.Stats, p.Name, p.Version, p.Since)
	out.State, out.Entries = proto.PolicyState_POLICY_STATE_SHADOW, uint64(p.Entries)
	if p.Err != nil {
		out.State, out.Reason = proto.PolicyState_POLICY_STATE_QUARANTINE, p.Err.Error()
	}
	out.Trial = &proto.Trial{
		Keys: p.Keys, Hits: p.Hits, LiveHits: p.LiveHits, Dropped: p.Dropped, Capacity: uint64(p.Capacity), Used: uint64(p.Used),
	}
	return out
}

func statusOf(p *policy.Stats, name, version string, since time.Time) *proto.PolicyStatus {
	return &proto.PolicyStatus{
		Name: name, Version: version, Since: float64(since.UnixMilli()) / 1e3, Role: p.Role.String(), Module: p.Module, Digest: p.Digest,
		Calls: p.Calls, Records: p.Records, Seconds: p.Time.Seconds(), Faults: p.Faults, Fuel: p.Fuel,
		Memory: p.Memory,
	}
}
