package server

import (
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/server/socket"
)

// Reload changes the rules of tenants, who may connect, and the room that stores share by the capacity of the roots. Sessions
// that run keep the tenant that HELLO gave them, and what they hold. An error is of the sockets' modes: all else was changed.
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
