package host

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/server"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// Status is the part of the Status call that the server cannot answer itself.
func (h *Host) Status() *proto.StatusResponse {
	st := h.store.Stats()
	policies := h.policies.Memory()
	out := &proto.StatusResponse{PolicyMemory: policies.Used(), PolicyMemoryLimit: policies.Limit()}
	for i := range st.Policies {
		out.Policies = append(out.Policies, policyStatus(&st.Policies[i]))
	}
	for i := range st.Shadows {
		out.Policies = append(out.Policies, shadowStatus(&st.Shadows[i]))
	}
	buckets := h.devices.Buckets()
	for _, r := range st.Roots {
		s := rootStatus(&r)
		if b := buckets[r.Path]; b != nil && s.Reason == "" {
			s.Reason = costs(b.Cost(r.Used))
		}
		out.Roots = append(out.Roots, s)
	}
	for _, t := range h.engine.Traffic() {
		for i := range t.Routes {
			out.Routes = append(out.Routes, routeStatus(&t, &t.Routes[i]))
		}
	}
	var bounds []*durationpb.Duration
	for _, seconds := range server.LatencyBounds {
		bounds = append(bounds, durationpb.New(time.Duration(seconds*1e9)))
	}
	for _, l := range h.server.Latencies() {
		out.Latencies = append(out.Latencies, &proto.LatencyStatus{
			Answer: proto.Value[proto.Answer](l.Answer.String()), Count: l.Count, Sum: durationpb.New(l.Sum), Bounds: bounds,
			Buckets: l.Buckets[:],
		})
	}
	for _, u := range h.server.Usage() {
		out.Usage = append(out.Usage, &proto.UsageStatus{
			Model: u.Model, Tenant: u.Tenant, Keys: u.Keys.Load(), Hits: u.Hits.Load(),
			LoadedBytes: u.LoadedBytes.Load(), StoredBytes: u.StoredBytes.Load(),
		})
	}
	for _, p := range h.peers.Stats() {
		out.Peers = append(out.Peers, &proto.PeerStatus{Name: p.Name, Address: p.Address, State: string(p.State), Reason: p.Reason,
			Entries: uint64(p.Entries), Heard: durationpb.New(p.Heard), Asks: p.Asks, Failures: p.Failures, Keys: p.Keys, Struck: p.Struck,
			Bytes: p.Bytes, Blamed: p.Blamed, Turnover: durationpb.New(p.Turnover), Offers: p.Offers, Taken: p.Taken,
			Nixl: p.NIXL, NixlBytes: p.NIXLBytes, NixlFallbacks: p.NIXLFallbacks})
	}
	out.Counters = observe.Counters(&st, h.engine.Stats())
	select {
	case <-h.Ready():
		out.Serving = true
	default:
	}
	out.NotReady = h.notReady(out)
	return out
}

// costs says what a bucket costs.
func costs(c s3fs.Cost, known bool) string {
	if !known {
		return ""
	}
	return fmt.Sprintf("a day costs %.2f at its prices: %.2f for requests, %.2f for bytes read, %.2f for what is stored",
		c.Requests+c.Read+c.Stored, c.Requests, c.Read, c.Stored)
}

func rootStatus(r *store.RootStats) *proto.RootStatus {
	out := &proto.RootStatus{
		Path: r.Path, Capacity: uint64(r.Capacity), Used: uint64(r.Used), Entries: uint64(r.Entries), Reason: r.Reason,
		Writing: uint64(r.Writing), Quarantine: uint64(r.Held), Orphaned: uint64(r.Orphaned), Limit: uint64(r.Limit),
		Scanning: r.Scanning, Evictions: r.Evictions, Sheds: r.Sheds, Outages: r.Outages, Damaged: r.Damaged, Shared: r.Shared != nil,
		Compression: r.Why,
	}
	if !r.Since.IsZero() {
		out.Since = timestamppb.New(r.Since)
	}
	switch r.State {
	case health.In:
		out.State = proto.RootState_ROOT_STATE_IN_SERVICE
		if r.Limit < r.Capacity/2 {
			out.Reason = fmt.Sprintf("its file system, less min_free, has room for %s of its capacity", config.SizeText(max(0, r.Limit)))
		}
	case health.Full:
		out.State = proto.RootState_ROOT_STATE_FULL
		out.Reason += fmt.Sprintf(": it holds %s, new chunks take the place of others or go to other roots; next look for room in %s",
			config.SizeText(r.Limit), r.Ceiling.Round(time.Second))
	case health.ReadOnly:
		out.State = proto.RootState_ROOT_STATE_READ_ONLY
	default:
		out.State = proto.RootState_ROOT_STATE_OUT
	}
	return out
}

func routeStatus(t *transfer.Traffic, r *transfer.RouteTraffic) *proto.RouteStatus {
	return &proto.RouteStatus{
		Gpu: observe.GPULabel(t.Device), Root: t.Root, Route: proto.Value[proto.Route](r.Route),
		Direction: proto.Value[proto.Direction](observe.Direction(t.Kind)), Files: uint64(r.Files),
		Bytes: uint64(r.Bytes), Errors: uint64(r.Errors), InFlight: uint32(r.InFlight), Busy: durationpb.New(r.Busy),
	}
}

func policyStatus(p *store.PolicyStats) *proto.PolicyStatus {
	out := statusOf(&p.Stats, p.Name, p.Version, p.Since)
	out.Root, out.State = p.Root, proto.PolicyState_POLICY_STATE_ACTING
	switch {
	case p.Quarantine != nil:
		out.State, out.Reason = proto.PolicyState_POLICY_STATE_QUARANTINE, p.Quarantine.Error()
	case p.Builtin:
		out.State = proto.PolicyState_POLICY_STATE_STANDIN
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
		Name: name, Version: version, Since: timestamppb.New(since), Role: proto.Value[proto.PolicyRole](p.Role.String()), Module: p.Module,
		Digest: digestOf(p.Digest),
		Calls:  p.Calls, Records: p.Records, Time: durationpb.New(p.Time), Faults: p.Faults, Fuel: p.Fuel,
		Memory: p.Memory,
	}
}

// digestOf is a module's digest, empty for one that is built in.
func digestOf(digest string) string {
	if digest == "native" {
		return ""
	}
	return digest
}
