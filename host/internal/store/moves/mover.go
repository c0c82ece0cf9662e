package moves

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

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
	Taken                 // another host evicts it and has offered it
	Kinds
)

func (k Kind) String() string {
	return [...]string{"demotion", "promotion", "through", "prefetch", "taken"}[k]
}

// Move is an entry to be copied.
type Move interface {
	// Bytes is how much it is.
	Bytes() int64
	// Level is the farther one of the two that it goes between.
	Level() int
	// Value is what a copy of a byte is worth. It may change while the move waits: [Mover.Changed].
	Value() float64
	// Run copies it. It says true when it is to be run again after another move.
	Run(ctx context.Context, c *Copier) (again bool)
	// Shed says that it will not be run.
	Shed()
	// Cancelled says that it is not wanted any more.
	Cancelled() bool
}

// Config makes a mover. Zero is a default.
type Config struct {
	Workers   int           // copies at a time, of each of Levels: 2
	Bandwidth int64         // bytes per second over all of them; 0: no limit
	Waiting   time.Duration // that what waits takes to be copied, at most: a minute
	Loads     *Loads
	Levels    []int // that moves have as the farther one
}

// Most moves that may wait, whatever their size.
const maxWaiting = 1 << 14

const (
	defaultWorkers = 2
	defaultWaiting = time.Minute
	assumedSpeed   = 256 << 20 // bytes per second of a worker that has copied nothing yet
)

// Mover runs moves, the most valuable first. Those that a far level holds up keep no other from a worker. It is safe for concurrent use.
type Mover struct {
	cfg    Config
	slots  *staging.Slots
	budget budget

	mu      sync.Mutex
	changed sync.Cond     // a move waits, one has ended, or no more are taken
	lanes   map[int]*lane // by level
	again   []Move        // that wait for the end of any other
	ends    uint64        // moves that have ended: one that is to run again may have missed the last it waits for
	closed  bool
}

// New makes a mover. Its memory is touched when the first moves are run.
func New(cfg Config) (*Mover, error) {
	cfg.Workers, cfg.Waiting = cmp.Or(cfg.Workers, defaultWorkers), cmp.Or(cfg.Waiting, defaultWaiting)
	if cfg.Loads == nil {
		cfg.Loads = &Loads{}
	}
	slots, err := staging.NewSlots(cfg.Workers*len(cfg.Levels), bufferBytes)
	if err != nil {
		return nil, fmt.Errorf("store: buffers of moves: %w", err)
	}
	m := &Mover{cfg: cfg, slots: slots, budget: budget{loads: cfg.Loads, rate: Rate{PerSecond: cfg.Bandwidth}},
		lanes: map[int]*lane{}}
	for _, level := range cfg.Levels {
		m.lanes[level] = &lane{of: map[Move]*list.Element{}}
	}
	m.changed.L = &m.mu
	return m, nil
}

// Offer queues a move. It says false, and the move will not run, when too many wait already that are worth as much. Others make room
// for it.
func (m *Mover) Offer(v Move) (queued bool) {
	var shed []Move
	m.mu.Lock()
	l := m.lanes[v.Level()]
	for !m.closed && !m.fits(l, v) {
		least := l.shed(class(v).class)
		if least == nil {
			break
		}
		shed = append(shed, least)
	}
	if queued = !m.closed && m.fits(l, v); queued {
		l.push(v)
		l.moves++
	}
	m.changed.Broadcast()
	m.mu.Unlock()
	shedAll(shed)
	return queued
}

// fits says whether another move may wait. m.mu is held.
func (m *Mover) fits(l *lane, v Move) bool {
	return len(l.of) < maxWaiting && (len(l.of) == 0 || l.waiting+v.Bytes() <= m.mayWait(l))
}

// mayWait is how many bytes may. m.mu is held.
func (m *Mover) mayWait(l *lane) int64 {
	return int64(float64(m.cfg.Workers) * l.speed(assumedSpeed) * m.cfg.Waiting.Seconds())
}

// Changed says that the value of a move has changed, or that it is not wanted any more. It takes no lock of a set.
func (m *Mover) Changed(v Move) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lanes[v.Level()].changed(v)
}

// Prune sheds the waiting moves that are not wanted any more.
func (m *Mover) Prune() { m.prune(Move.Cancelled) }

func (m *Mover) prune(gone func(Move) bool) {
	var shed []Move
	m.mu.Lock()
	for _, l := range m.lanes {
		shed = append(shed, l.prune(gone)...)
	}
	m.again = slices.DeleteFunc(m.again, func(v Move) bool {
		if !gone(v) {
			return false
		}
		l := m.lanes[v.Level()]
		l.waiting -= v.Bytes()
		l.moves--
		shed = append(shed, v)
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
	for _, l := range m.lanes {
		for range m.cfg.Workers {
			workers.Go(func() { m.work(ctx, l) })
		}
	}
	workers.Wait()
	m.mu.Lock()
	left := m.again
	m.again = nil
	for _, l := range m.lanes {
		left = append(left, l.prune(func(Move) bool { return true })...)
		l.waiting, l.moves = 0, 0
	}
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

// work runs moves of a lane.
func (m *Mover) work(ctx context.Context, l *lane) {
	slot, err := m.slots.Acquire(ctx)
	if err != nil {
		return
	}
	defer slot.Release()
	c := &Copier{buf: slot.Bytes(), budget: &m.budget}
	for {
		m.mu.Lock()
		for len(l.of) == 0 && !m.closed {
			m.changed.Wait()
		}
		if m.closed {
			m.mu.Unlock()
			return
		}
		v := l.pop()
		began, start := m.ends, time.Now()
		m.mu.Unlock()
		c.copied = 0
		again := v.Run(ctx, c)
		m.mu.Lock()
		if c.copied > 0 {
			l.ran(c.copied, time.Since(start).Seconds())
		}
		m.mu.Unlock()
		m.ended(l, v, began, again)
	}
}

// ended ends a move that was run, and lets those run that wait for that. Began is how many had ended when it began.
func (m *Mover) ended(l *lane, v Move, began uint64, again bool) {
	m.mu.Lock()
	switch {
	case again && m.ends != began && !m.closed: // another has ended since
		l.push(v)
		again = false
	case again && m.moves() > len(m.again)+1 && !m.closed:
		m.again = append(m.again, v)
		l.waiting += v.Bytes()
		again = false
	default:
		l.moves--
		m.ends++
		for _, v := range m.again {
			l := m.lanes[v.Level()]
			l.waiting -= v.Bytes()
			l.push(v)
		}
		m.again = nil
	}
	m.changed.Broadcast()
	m.mu.Unlock()
	if again {
		v.Shed() // no other is under way
	}
}

// moves is how many wait or run. m.mu is held.
func (m *Mover) moves() (n int) {
	for _, l := range m.lanes {
		n += l.moves
	}
	return n
}

// Hurry lifts the limits of bandwidth and sheds what waits: there are no more loads.
func (m *Mover) Hurry() {
	m.budget.hurry.Store(true)
	m.prune(func(Move) bool { return true })
}

// await waits until something holds. Holds is called with m.mu held.
func (m *Mover) await(ctx context.Context, holds func() bool) error {
	stop := context.AfterFunc(ctx, func() {
		m.mu.Lock() // not between the look at ctx and the wait
		defer m.mu.Unlock()
		m.changed.Broadcast()
	})
	defer stop()
	m.mu.Lock()
	defer m.mu.Unlock()
	for !holds() {
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
		if err := m.await(ctx, func() bool { return m.moves() == 0 }); err != nil {
			return err
		}
	}
}

// InFlight is how many moves wait or run, and the bytes of those that wait.
func (m *Mover) InFlight() (moves int, waiting int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lanes {
		waiting += l.waiting
	}
	return m.moves(), waiting
}

// A move ends without a copy.
var (
	// ErrCancelled says that the entry has gone, or that the copy is not wanted any more.
	ErrCancelled = errors.New("store: move is cancelled")
	// ErrRefused says that another host does not take what it was offered.
	ErrRefused = errors.New("store: the offer is refused")
	// ErrBehind says that a level has no room at present: what leaves has no copy yet, or its memory is being allocated.
	ErrBehind = errors.New("store: the level has no room yet")
	// ErrLayout says that new pieces of the group have another layout than the entry's.
	ErrLayout = errors.New("store: the entry has an earlier layout, which is not written any more")
	// ErrTable says that a piece has a longer table than is copied at a time. There is nothing wrong with the piece.
	ErrTable = errors.New("store: the piece has too many extents to be copied")
)
