package server

import (
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/server/socket"
)

// Reload changes the tenants' rules, the users that may connect, and the capacity from which the shares of waiting stores are
// derived. Running sessions keep their tenants and the resources that they hold. If setting the modes of the sockets fails,
// Reload returns the error, and all other changes are in effect.
func (s *Server) Reload(rules socket.Rules, users socket.Users, capacity int64) error {
	cfg := s.cfg
	cfg.Rules, cfg.Users, cfg.Capacity = rules, users, capacity
	s.budgets.Room.DivideAs(budget.OfRoom(capacity, cfg.Limits.Sessions))
	s.budgets.Leased.DivideAs(budget.OfLeased(capacity, cfg.Limits.Sessions))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current.Store(&cfg)
	if s.sockets == nil {
		return nil
	}
	return s.sockets.SetUsers(cfg.Users)
}
