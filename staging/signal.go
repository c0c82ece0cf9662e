package staging

import "sync"

// Signal wakes all goroutines that wait for room once there is some. Its zero value is ready, and it is safe for concurrent use.
type Signal struct {
	mu   sync.Mutex
	wait chan struct{} // nil: nothing waits
}

// Next returns a channel that the next [Signal.Send] closes. Take it before you look for room, or a Send between the two is missed.
func (s *Signal) Next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wait == nil {
		s.wait = make(chan struct{})
	}
	return s.wait
}

// Send wakes all waiting goroutines.
func (s *Signal) Send() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wait != nil {
		close(s.wait)
		s.wait = nil
	}
}
