package moves

import (
	"cmp"
	"context"
	"errors"
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
	// Leaves says that the entry leaves: whoever offers it has looked for [Mover.Room].
	Leaves() bool
	// Run copies it. It says true when it is to be run again after another move.
	Run(ctx context.Context, c *Copier) (again bool)
	// Shed says that it will not be run.
	Shed()
	// Yields says that others are run instead where not all can wait.
	Yields() bool
	// Cancelled says that it is not wanted any more.
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
	again    []Move // that wait for the end of any other
	waiting  int64  // bytes of both
	yielding int    // moves of both that yield
	yields   int64  // their bytes
	running  int
	ends     uint64 // moves that have ended: one that is to run again may have missed the last it waits for
	closed   bool
}

// New makes a mover. Its memory is touched when the first moves are run.
func New(cfg Config) (*Mover, error) {
	cfg.Workers, cfg.Waiting = cmp.Or(cfg.Workers, defaultWorkers), cmp.Or(cfg.Waiting, defaultWaiting)
	if cfg.Loads == nil {
		cfg.Loads = &Loads{}
	}
	slots, err := staging.NewSlots(cfg.Workers, bufferBytes)
	if err != nil {
		return nil, fmt.Errorf("store: buffers of moves: %w", err)
	}
	m := &Mover{cfg: cfg, slots: slots, budget: budget{loads: cfg.Loads, rate: Rate{PerSecond: cfg.Bandwidth}}}
	m.changed.L = &m.mu
	return m, nil
}

// room is how many bytes of moves that do not yield may be offered before too many wait: one move more, when none waits.
func (m *Mover) room() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case len(m.queue) == 0:
		return max(1, m.cfg.Waiting)
	case len(m.queue) >= maxWaiting:
		return 0
	}
	return max(0, m.cfg.Waiting-m.waiting+m.yields)
}

// Offer queues a move. It says false, and the move will not run, when too many wait already, also without the last of
// those that yield to it. What leaves is queued all the same.
func (m *Mover) Offer(v Move) (queued bool) {
	var shed []Move
	m.mu.Lock()
	if !v.Yields() {
		for at := len(m.queue) - 1; at >= 0 && m.yielding > 0 && !m.fits(v); at-- {
			if m.queue[at].Yields() {
				shed = append(shed, m.queue[at])
				m.count(m.queue[at], -1)
				m.queue = slices.Delete(m.queue, at, at+1)
			}
		}
	}
	if queued = !m.closed && (v.Leaves() || m.fits(v)); queued {
		m.queue = append(m.queue, v)
		m.count(v, 1)
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

// count counts a move that waits in, or out. m.mu is held.
func (m *Mover) count(v Move, n int) {
	m.waiting += int64(n) * v.Bytes()
	if v.Yields() {
		m.yielding += n
		m.yields += int64(n) * v.Bytes()
	}
}

// Prune sheds the waiting moves that are not wanted any more.
func (m *Mover) Prune() {
	var shed []Move
	m.mu.Lock()
	cancelled := func(v Move) bool {
		if !v.Cancelled() {
			return false
		}
		shed = append(shed, v)
		m.count(v, -1)
		return true
	}
	m.queue, m.again = slices.DeleteFunc(m.queue, cancelled), slices.DeleteFunc(m.again, cancelled)
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
	left := append(m.queue, m.again...)
	m.queue, m.again, m.waiting, m.yielding, m.yields = nil, nil, 0, 0, 0
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
		m.count(v, -1)
		m.running++
		began := m.ends
		m.mu.Unlock()
		m.ended(v, began, v.Run(ctx, c))
	}
}

// ended ends a move that was run, and lets those run that wait for that. Began is how many had ended when it began.
func (m *Mover) ended(v Move, began uint64, again bool) {
	m.mu.Lock()
	m.running--
	switch {
	case again && m.ends != began && !m.closed: // another has ended since
		m.queue = append(m.queue, v)
		m.count(v, 1)
		again = false
	case again && m.running+len(m.queue) > 0 && !m.closed:
		m.again = append(m.again, v)
		m.count(v, 1)
		again = false
	default:
		m.ends++
		m.queue = append(m.queue, m.again...)
		m.again = nil
	}
	m.changed.Broadcast()
	m.mu.Unlock()
	if again {
		v.Shed() // no other is under way
	}
}

// Hurry lifts the limits of bandwidth: there are no more loads.
func (m *Mover) Hurry() { m.budget.hurry.Store(true) }

// wait waits until no move waits or runs, or until at most so many bytes wait.
func (m *Mover) wait(ctx context.Context, waiting int64) error {
	stop := context.AfterFunc(ctx, func() {
		m.mu.Lock() // not between the look at ctx and the wait
		defer m.mu.Unlock()
		m.changed.Broadcast()
	})
	defer stop()
	m.mu.Lock()
	defer m.mu.Unlock()
	for m.waiting > waiting || waiting == 0 && m.running+len(m.queue)+len(m.again) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		m.changed.Wait()
	}
	return nil
}

// Settle waits until step offers nothing more and no move is under way.
func (m *Mover) Settle(ctx context.Context, step func()) error {
	for {
		step()
		if n, _ := m.InFlight(); n == 0 {
			return nil
		}
		if err := m.wait(ctx, 0); err != nil {
			return err
		}
	}
}

// InFlight is how many moves wait or run, and the bytes of those that wait.
func (m *Mover) InFlight() (moves int, waiting int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.running + len(m.queue) + len(m.again), m.waiting
}

// A move ends without a copy.
var (
	// ErrCancelled says that the entry has gone, or that the copy is not wanted any more.
	ErrCancelled = errors.New("store: move is cancelled")
	// ErrBehind says that a level has no room at present: what leaves has no copy yet, or its memory is being allocated.
	ErrBehind = errors.New("store: the level has no room yet")
	// ErrLayout says that new pieces of the group have another layout than the entry's.
	ErrLayout = errors.New("store: the entry has an earlier layout, which is not written any more")
	// ErrTable says that a piece has a longer table than is copied at a time. There is nothing wrong with the piece.
	ErrTable = errors.New("store: the piece has too many extents to be copied")
)
