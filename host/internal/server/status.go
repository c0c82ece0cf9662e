package server

import (
	"cmp"
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
)

// maxListed is the maximum number of sessions in a Status reply.
const maxListed = 256

// mostHolders is the number of largest holders that Status names for each budget.
const mostHolders = 3

func (s service) Status(ctx context.Context, _ *proto.StatusRequest) (*proto.StatusResponse, error) {
	r := s.Server.Status()
	if err := socket.Caller(ctx).Answer(protobuf.Size(r)); err != nil {
		return nil, status.Error(codes.ResourceExhausted, err.Error())
	}
	return r, nil
}

// Status returns the state of the host: the state of the server, added to the result of Config.Info.
func (s *Server) Status() *proto.StatusResponse {
	r := &proto.StatusResponse{}
	if s.cfg.Info != nil {
		if info := s.cfg.Info(); info != nil {
			r = info
		}
	}
	st := s.Stats()
	r.Version = s.cfg.Version
	r.Uptime = durationpb.New(time.Since(s.started))
	r.Sessions, r.Engines = uint32(st.Sessions), uint32(st.Engines)
	r.Leases, r.Jobs, r.ArenaBytes = uint64(st.Leases), uint64(st.Jobs), uint64(st.ArenaBytes)
	r.SessionList = s.listSessions()
	for _, f := range s.Budgets(mostHolders) {
		b := &proto.BudgetStatus{Of: f.Of, Limit: uint64(f.Limit), Own: uint64(f.Own), Held: uint64(f.Held), Refused: f.Refused,
			Parts: map[string]uint64{}}
		for part, n := range f.Parts {
			b.Parts[part] = uint64(n)
		}
		for _, h := range f.Most {
			b.Most = append(b.Most, &proto.Holder{Name: h.Holder, Tenant: h.Tenant, Held: uint64(h.Held)})
		}
		r.Budgets = append(r.Budgets, b)
	}
	return r
}

// listSessions returns the oldest sessions that have sent HELLO.
func (s *Server) listSessions() (list []*proto.SessionStatus) {
	s.mu.Lock()
	sessions := make([]*session, 0, len(s.sessions))
	for _, x := range s.sessions {
		if x.profile.Load().status != nil {
			sessions = append(sessions, x)
		}
	}
	s.mu.Unlock()
	slices.SortFunc(sessions, func(a, b *session) int { return cmp.Compare(a.number, b.number) })
	for _, x := range sessions[:min(len(sessions), maxListed)] {
		st := x.profile.Load().Status()
		st.Jobs = uint32(x.jobs.len())
		x.engine.mu.Lock() // engine is set before the profile
		st.Leases = uint32(x.granted.leases)
		x.engine.mu.Unlock()
		list = append(list, st)
	}
	return list
}

// Latencies returns the histograms of answer times.
func (s *Server) Latencies() []Latency { return s.latencies.Read() }

// Usage returns the counters of all models and tenants.
func (s *Server) Usage() []*Usage { return s.usage.List() }

// Budgets returns the resources that clients occupy. For each resource it lists at most the given number of largest holders.
func (s *Server) Budgets(most int) []budget.Figures {
	return append(s.budgets.Figures(most), s.cfg.Peers.Budgets(most)...)
}

// HTTPConnections returns the limit on connections to the host's HTTP interface.
func (s *Server) HTTPConnections() *budget.Connections { return s.budgets.HTTP }

// Stats counts the resources that clients occupy now.
type Stats struct {
	Sessions, Engines, Leases, Jobs int
	ArenaBytes                      int64
}

func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Stats{Sessions: len(s.sessions), Engines: len(s.engines), Jobs: int(s.jobs.Load()), ArenaBytes: s.mapped.Load()}
	for _, e := range s.engines {
		e.mu.Lock()
		st.Leases += len(e.leases)
		e.mu.Unlock()
	}
	return st
}
