package server

import (
	"runtime"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/server/socket"
)

// budgets are what the sessions of a configuration share.
func (c *Config) budgets() budget.Sessions {
	return budget.Sessions{
		Memory: c.Memory, Arriving: c.Arriving, Descriptors: budget.OfDescriptors(c.Limits.Sessions),
		Room: budget.OfRoom(c.Capacity, c.Limits.Sessions), Leased: budget.OfLeased(c.Capacity, c.Limits.Sessions),
		Mappings: budget.OfMappings(c.Limits.Sessions), Passing: budget.OfPassing(), HTTP: budget.OfHTTP(),
		Processors: float64(runtime.GOMAXPROCS(0)),
	}
}

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

func (s *Server) rules() socket.Rules { return s.current.Load().Rules }

// listen makes the sockets, and lets Reload change who may connect.
func (s *Server) listen(path string) (*socket.Pair, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	socks, err := socket.Listen(path, s.current.Load().Users, s.cfg.Log)
	if err == nil {
		s.sockets = socks
	}
	return socks, err
}

func (s *Server) unlisten(socks *socket.Pair) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sockets = nil
	socks.Close()
}
