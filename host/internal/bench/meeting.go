package bench

import (
	"context"
	"sync"
)

// meeting makes all clients begin and end each pass together, so that their rates are measured at the same time.
type meeting struct {
	clients int
	mu      sync.Mutex
	there   int
	begun   chan struct{} // closed when all clients have arrived
}

func newMeeting(clients int) *meeting { return &meeting{clients: clients, begun: make(chan struct{})} }

// meet returns when all clients have called it.
func (m *meeting) meet(ctx context.Context) error {
	m.mu.Lock()
	begun := m.begun
	if m.there++; m.there == m.clients {
		m.there, m.begun = 0, make(chan struct{})
		close(begun)
	}
	m.mu.Unlock()
	select {
	case <-begun:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
