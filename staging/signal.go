package staging

import "sync"

// Signal wakes all that wait for room once some has come. Its zero value is ready for use, by several goroutines.
type Signal struct {
	mu   sync.Mutex
	wait chan struct{} // nil: nothing waits
}

// Next is closed by the next [Signal.Send]. Who waits for room takes it before it looks for room.
func (s *Signal) Next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wait == nil {
		s.wait = make(chan struct{})
	}
	return s.wait
}

// Send wakes all that wait.
func (s *Signal) Send() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wait != nil {
		close(s.wait)
		s.wait = nil
	}
}
