package moves

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvhost/kvhost/staging"
)

// Kind says why an entry is copied.
type Kind uint8

// The kinds.
const (
	Demotion  Kind = iota // it is about to leave a nearer level
	Promotion             // it was granted from a farther level
	Through               // it was just stored, in a root that writes through
	Kinds
)

func (k Kind) String() string { return [...]string{"demotion", "promotion", "through"}[k] }

// Move is an entry to be copied.
type Move interface {
	// Bytes is how much it is.
	Bytes() int64
	// Run copies it.
	Run(ctx context.Context, c *Copier)
	// Shed says that it will not be run.
	Shed()
}

// Config makes a mover. Zero is a default.
type Config struct {
	Workers   int   // copies at a time: 2
	Bandwidth int64 // bytes per second over all of them; 0: no limit
	Waiting   int64 // bytes of moves that may wait: 256 MiB
	Loads     *Loads
}

// Most moves that may wait, whatever their size.
const maxWaiting = 1 << 14

const (
	defaultWorkers = 2
	defaultWaiting = 256 << 20
)

// Mover runs moves. It is safe for concurrent use.
type Mover struct {
	cfg    Config
	slots  *staging.Slots
	budget budget

	mu      sync.Mutex
	changed sync.Cond // a move waits, one has ended, or no more are taken
	queue   []Move
	waiting int64 // bytes of queue
	running int
	closed  bool
}

// New makes a mover. Its memory is touched when the first moves are run.
func New(cfg Config) (*Mover, error) {
	if cfg.Workers == 0 {
		cfg.Workers = defaultWorkers
	}
	if cfg.Waiting == 0 {
		cfg.Waiting = defaultWaiting
	}
	if cfg.Loads == nil {
		cfg.Loads = &Loads{}
	}
	slots, err := staging.NewSlots(cfg.Workers, bufferBytes)
	if err != nil {
		return nil, fmt.Errorf("store: buffers of moves: %w", err)
	}
	m := &Mover{cfg: cfg, slots: slots, budget: budget{loads: cfg.Loads, perSecond: cfg.Bandwidth}}
	m.changed.L = &m.mu
	return m, nil
}

// Offer queues a move. It says false, and the move will not run, when too many wait already.
func (m *Mover) Offer(v Move) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || len(m.queue) >= maxWaiting || len(m.queue) > 0 && m.waiting+v.Bytes() > m.cfg.Waiting {
		return false
	}
	m.queue = append(m.queue, v)
	m.waiting += v.Bytes()
	m.changed.Broadcast()
	return true
}

// Run runs moves until the context is done. What waits then is shed.
func (m *Mover) Run(ctx context.Context) {
	stop := context.AfterFunc(ctx, m.close)
	defer stop()
	var workers sync.WaitGroup
	for range m.cfg.Workers {
		workers.Go(func() { m.work(ctx) })
	}
	workers.Wait()
	m.mu.Lock()
	left := m.queue
	m.queue, m.waiting = nil, 0
	m.changed.Broadcast()
	m.mu.Unlock()
	for _, v := range left {
		v.Shed()
	}
}

// Close frees the buffers. Run has ended, or was not called.
func (m *Mover) Close() error { return m.slots.Close() }

func (m *Mover) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	m.changed.Broadcast()
}

// work runs moves.
func (m *Mover) work(ctx context.Context) {
	slot, err := m.slots.Acquire(ctx)
	if err != nil {
		return
	}
	defer slot.Release()
	c := &Copier{buf: slot.Bytes(), budget: &m.budget}
	for {
		m.mu.Lock()
		for len(m.queue) == 0 && !m.closed {
			m.changed.Wait()
		}
		if m.closed {
			m.mu.Unlock()
			return
		}
		v := m.queue[0]
		m.queue[0] = nil
		m.queue = m.queue[1:]
		m.waiting -= v.Bytes()
		m.running++
		m.mu.Unlock()
		v.Run(ctx, c)
		m.mu.Lock()
		m.running--
		m.changed.Broadcast()
		m.mu.Unlock()
	}
}

// Hurry lifts the limits of bandwidth: nobody loads any more.
func (m *Mover) Hurry() { m.budget.hurry.Store(true) }

// Wait waits until no move waits or runs, or until at most so many bytes wait.
func (m *Mover) Wait(ctx context.Context, waiting int64) error {
	stop := context.AfterFunc(ctx, func() {
		m.mu.Lock() // not between the look at ctx and the wait
		defer m.mu.Unlock()
		m.changed.Broadcast()
	})
	defer stop()
	m.mu.Lock()
	defer m.mu.Unlock()
	for m.waiting > waiting || waiting == 0 && m.running+len(m.queue) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		m.changed.Wait()
	}
	return nil
}

// InFlight is how many moves wait or run, and the bytes of those that wait.
func (m *Mover) InFlight() (moves int, waiting int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.running + len(m.queue), m.waiting
}
