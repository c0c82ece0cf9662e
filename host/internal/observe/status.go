package observe

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server"
)

// Status returns the part of the status that the server does not know, without the reasons why the host is not ready.
func (h *Host) Status() *proto.StatusResponse {
	st, ts := h.Store.Stats(), h.Engine.Stats()
	out := &proto.StatusResponse{PolicyMemory: h.PolicyMemory.Used(), PolicyMemoryLimit: h.PolicyMemory.Limit(), Counters: map[string]uint64{}}
	wholeHost.count(out.Counters, "", &totals{&st, &ts})
	countLevels(out.Counters, &st)
	for i := range st.Policies {
		out.Policies = append(out.Policies, policyStatus(&st.Policies[i]))
	}
	for i := range st.Shadows {
		out.Policies = append(out.Policies, shadowStatus(&st.Shadows[i]))
	}
	for i := range st.Roots {
		out.Roots = append(out.Roots, rootStatus(&st.Roots[i]))
	}
	for _, t := range h.Engine.Traffic() {
		for i := range t.Routes {
			out.Routes = append(out.Routes, routeStatus(&t, &t.Routes[i]))
		}
	}
	var bounds []*durationpb.Duration
	for _, seconds := range server.LatencyBounds {
		bounds = append(bounds, durationpb.New(time.Duration(seconds*1e9)))
	}
	for _, l := range h.Server.Latencies() {
		out.Latencies = append(out.Latencies, &proto.LatencyStatus{
			Answer: proto.Value[proto.Answer](l.Answer.String()), Count: l.Count, Sum: durationpb.New(l.Sum), Bounds: bounds,
			Buckets: l.Buckets[:],
		})
	}
	for _, u := range h.Server.Usage() {
		s := &proto.UsageStatus{Model: u.Model, Tenant: u.Tenant}
		ofUsage.fill(s, u)
		out.Usage = append(out.Usage, s)
	}
	for _, p := range h.Peers.Stats() {
		s := &proto.PeerStatus{Name: p.Name, Address: p.Address, State: string(p.State), Reason: p.Reason}
		ofPeer.fill(s, &p)
		out.Peers = append(out.Peers, s)
	}
	return out
}
