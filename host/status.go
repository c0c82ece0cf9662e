package host

import (
	"github.com/kvhost/kvhost/host/proto"
)

// status is the part of the Status call that the server does not know itself.
func (h *Host) status() *proto.StatusReply {
	st := h.store.Stats()
	out := &proto.StatusReply{}
	for _, p := range st.Policies {
		out.Policies = append(out.Policies, &proto.PolicyStatus{
			Role: p.Role.String(), Module: p.Module, Digest: p.Digest,
			Calls: p.Calls, Records: p.Records, Seconds: p.Time.Seconds(), Faults: p.Faults, Fuel: p.Fuel,
		})
	}
	for _, r := range st.Roots {
		out.Roots = append(out.Roots, &proto.RootStatus{
			Path: r.Path, Capacity: uint64(r.Capacity), Used: uint64(r.Used), Entries: uint64(r.Entries),
		})
	}
	out.Counters = map[string]uint64{}
	for _, m := range counters {
		out.Counters[m.name] = uint64(m.value(&st, h.engine.Stats()))
	}
	return out
}
