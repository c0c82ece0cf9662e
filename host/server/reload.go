package server

import (
	"fmt"

	"github.com/kvhost/kvhost/host/server/share"
	"github.com/kvhost/kvhost/host/server/socket"
)

// budgets are what the sessions of a configuration share.
func (c *Config) budgets() share.Budgets {
	return share.Budgets{
		Memory: c.Memory, Arriving: c.Arriving, Descriptors: share.DescriptorBudget(c.Limits.Sessions),
		Room: share.RoomBudget(c.Capacity, c.Limits.Sessions),
	}
}

// Reloadable says whether Reload can take a configuration: clients were told how large a message may be, and that must
// still arrive.
func (s *Server) Reloadable(next Config) error {
	next = next.orDefaults()
	if most := socket.LargestMessage(next.Arriving.Alone()); most < s.cfg.Limits.MessageBytes {
		return fmt.Errorf("%w: messages of %d bytes, which clients were told they may send, would not fit: at most %d",
			ErrTooSmall, s.cfg.Limits.MessageBytes, most)
	}
	return nil
}

// Reload changes limits, times, pins, rules of tenants, users, capacity and the memory that sessions share to those of
// another configuration; the rest of it is ignored. Sessions that run keep the limits and the tenant that HELLO gave them,
// and what they hold. An error is of the sockets' modes: all else was changed.
func (s *Server) Reload(next Config) error {
	next = next.orDefaults()
	cfg := s.cfg
	cfg.Limits, cfg.LeaseTTL, cfg.MaxWait, cfg.Capacity = next.Limits, next.LeaseTTL, next.MaxWait, next.Capacity
	cfg.Limits.MessageBytes = s.cfg.Limits.MessageBytes
	cfg.Pins, cfg.Rules, cfg.Users = next.Pins, next.Rules, next.Users
	b := next.budgets()
	s.budgets.DivideAs(&b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current.Store(&cfg)
	if s.sockets == nil {
		return nil
	}
	return s.sockets.SetUsers(cfg.Users)
}

// Current is the configuration that new sessions get.
func (s *Server) Current() Config { return *s.current.Load() }

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
