package moves

import (
	"context"
	"fmt"
	"slices"
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
	Prefetch              // a lookup found it farther away and asks for it
	Kinds
)

func (k Kind) String() string { return [...]string{"demotion", "promotion", "through", "prefetch"}[k] }

// Move is an entry to be copied.
type Move interface {
	// Bytes is how much it is.
	Bytes() int64
	// Run copies it.
	Run(ctx context.Context, c *Copier)
	// Shed says that it will not be run.
	Shed()
	// Yields says that others are run instead where not all can wait.
	Yields() bool
	// Cancelled says that nobody wants it any more.
	Cancelled() bool
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

	mu       sync.Mutex
	changed  sync.Cond // a move waits, one has ended, or no more are taken
	queue    []Move
	waiting  int64 // bytes of queue
	yielding int   // moves of queue that yield
	running  int
	closed   bool
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

// Offer queues a move. It says false, and the move will not run, when too many wait already, also without the last of
// those that yield to it.
func (m *Mover) Offer(v Move) (queued bool) {
	var shed []Move
	m.mu.Lock()
	if !v.Yields() {
		for at := len(m.queue) - 1; at >= 0 && m.yielding > 0 && !m.fits(v); at-- {
			if m.queue[at].Yields() {
				shed = append(shed, m.queue[at])
				m.leaves(m.queue[at])
				m.queue = slices.Delete(m.queue, at, at+1)
			}
		}
	}
	if queued = !m.closed && m.fits(v); queued {
		m.queue = append(m.queue, v)
		m.waiting += v.Bytes()
		if v.Yields() {
			m.yielding++
		}
	}
	m.changed.Broadcast()
	m.mu.Unlock()
	shedAll(shed)
	return queued
}

// fits says whether another move may wait. m.mu is held.
func (m *Mover) fits(v Move) bool {
	return len(m.queue) < maxWaiting && (len(m.queue) == 0 || m.waiting+v.Bytes() <= m.cfg.Waiting)
}

// leaves counts out a move that leaves the queue. m.mu is held.
func (m *Mover) leaves(v Move) {
	m.waiting -= v.Bytes()
	if v.Yields() {
		m.yielding--
	}
}

// Prune sheds the waiting moves that nobody wants any more.
func (m *Mover) Prune() {
	var shed []Move
	m.mu.Lock()
	m.queue = slices.DeleteFunc(m.queue, func(v Move) bool {
		if !v.Cancelled() {
			return false
		}
		shed = append(shed, v)
		m.leaves(v)
		return true
	})
	m.changed.Broadcast()
	m.mu.Unlock()
	shedAll(shed)
}

// shedAll takes locks of sets, which come before the mover's.
func shedAll(list []Move) {
	for _, v := range list {
		v.Shed()
	}
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
	m.queue, m.waiting, m.yielding = nil, 0, 0
	m.changed.Broadcast()
	m.mu.Unlock()
	shedAll(left)
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
		m.leaves(v)
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
