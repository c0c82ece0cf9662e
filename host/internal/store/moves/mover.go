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

// Kind is the reason why an entry is copied.
type Kind uint8

// Kinds of moves.
const (
	Demotion  Kind = iota // it is about to leave a nearer level
	Promotion             // it was granted from a farther level
	Through               // it was just stored, in a root that writes through
	Prefetch              // a lookup found it in a farther level and requested it
	Taken                 // another host evicts it and has offered it
	Kinds
)

func (k Kind) String() string {
	return [...]string{"demotion", "promotion", "through", "prefetch", "taken"}[k]
}

// Move is an entry to be copied.
type Move interface {
	// Bytes returns the size of the entry.
	Bytes() int64
	// Level returns the farther one of the two levels.
	Level() int
	// Value returns the value of a copied byte. It may change while the move waits: see [Mover.Changed].
	Value() float64
	// Run copies the entry. It returns true if it must run again after another move.
	Run(ctx context.Context, c *Copier) (again bool)
	// Shed tells the move that it will not run.
	Shed()
	// Cancelled reports whether the move is no longer wanted.
	Cancelled() bool
}

// Config configures a mover. Zero values mean defaults.
type Config struct {
	Workers   int           // concurrent copies for each of Levels; 0 means 2
	Bandwidth int64         // bytes a second over all copies; 0 means no limit
	Waiting   time.Duration // most time that waiting moves may need to be copied; 0 means a minute
	Loads     *Loads
	Levels    []int            // levels that can be the farther one of a move
	Now       func() time.Time // for the speed of moves; nil means time.Now
}

// maxWaiting is the maximum number of moves that may wait, whatever their size.
const maxWaiting = 1 << 14

const (
	defaultWorkers = 2
	defaultWaiting = time.Minute
	assumedSpeed   = 256 << 20 // bytes a second of a worker before its first copy
)

// Mover runs moves, the most valuable ones first. Each level has its own workers, so a slow far level does not hold up moves to
// others. It is safe for concurrent use.
type Mover struct {
	cfg    Config
	slots  *staging.Slots
	budget budget

	mu      sync.Mutex
	changed sync.Cond     // signalled when a move is queued, when one has ended, and at the close
	lanes   map[int]*lane // by level
	again   []Move        // moves that wait for the end of another move
	ends    uint64        // number of ended moves; shows a move that is to run again whether another has ended during its run
	closed  bool
}

// New returns a mover. The pages of its memory are first used by the first moves.
func New(cfg Config) (*Mover, error) {
	cfg.Workers, cfg.Waiting = cmp.Or(cfg.Workers, defaultWorkers), cmp.Or(cfg.Waiting, defaultWaiting)
	cfg.Loads = cmp.Or(cfg.Loads, &Loads{})
	if cfg.Now == nil {
		cfg.Now = time.Now
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

// Offer queues a move. It returns false, and the move will not run, if too many moves of the same or a higher value are
// waiting. Less valuable moves are shed to make room.
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

// fits reports whether another move may wait. m.mu must be held.
func (m *Mover) fits(l *lane, v Move) bool {
	return len(l.of) < maxWaiting && (len(l.of) == 0 || l.waiting+v.Bytes() <= m.mayWait(l))
}

// mayWait returns the bytes that may wait. m.mu must be held.
func (m *Mover) mayWait(l *lane) int64 {
	return int64(float64(m.cfg.Workers) * l.speed(assumedSpeed) * m.cfg.Waiting.Seconds())
}

// Changed tells the mover that the value of a move has changed or that it is no longer wanted. It takes no lock of a set.
func (m *Mover) Changed(v Move) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lanes[v.Level()].changed(v)
}

// Prune sheds the waiting moves that are no longer wanted.
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

// Run runs moves until the context is done, and then sheds the waiting ones.
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

// Close frees the buffers. Run must have ended, or must not have been called.
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
		t := m.take(l)
		m.mu.Unlock()
		t.run(ctx, c)
		m.ended(t)
	}
}

// Next makes the most valuable waiting move of a level. It returns nil if none waits. It is for a simulation, which has no
// workers: the move is over at the call of end, and the time until then is the time of its bytes.
func (m *Mover) Next(ctx context.Context, level int) (v Move, copied int64, end func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.lanes[level]
	if l == nil || len(l.of) == 0 {
		return nil, 0, nil
	}
	slot, err := m.slots.Acquire(ctx)
	if err != nil {
		return nil, 0, nil
	}
	defer slot.Release()
	t := m.take(l)
	m.mu.Unlock()
	t.run(ctx, &Copier{buf: slot.Bytes(), budget: &m.budget})
	m.mu.Lock()
	return t.v, t.copied, func() { m.ended(t) }
}

// taken is a move that a worker has taken from its lane.
type taken struct {
	v      Move
	l      *lane
	ends   uint64 // number of ended moves at that time
	start  time.Time
	copied int64
	again  bool // the move is to run again
}

// take takes the next move. m.mu must be held, and one must wait.
func (m *Mover) take(l *lane) *taken {
	return &taken{v: l.pop(), l: l, ends: m.ends, start: m.cfg.Now()}
}

func (t *taken) run(ctx context.Context, c *Copier) {
	c.copied = 0
	t.again = t.v.Run(ctx, c)
	t.copied = c.copied
}

// ended ends a move that has run, and queues the moves that wait for it.
func (m *Mover) ended(t *taken) {
	m.mu.Lock()
	l, v, again := t.l, t.v, t.again
	if t.copied > 0 {
		l.ran(t.copied, m.cfg.Now().Sub(t.start).Seconds())
	}
	switch {
	case again && m.ends != t.ends && !m.closed: // another move has ended during the run
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
		v.Shed() // no other move is under way
	}
}

// moves returns the number of moves that wait or run. m.mu must be held.
func (m *Mover) moves() (n int) {
	for _, l := range m.lanes {
		n += l.moves
	}
	return n
}

// Hurry lifts the limit of bandwidth and sheds the waiting moves, because there will be no more loads.
func (m *Mover) Hurry() {
	m.budget.hurry.Store(true)
	m.prune(func(Move) bool { return true })
}

// await waits until holds returns true. holds is called with m.mu held.
func (m *Mover) await(ctx context.Context, holds func() bool) error {
	stop := context.AfterFunc(ctx, func() {
		m.mu.Lock() // so that the broadcast cannot come between the check of ctx and the wait
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

// InFlight returns the number of moves that wait or run, and the bytes of the waiting ones.
func (m *Mover) InFlight() (moves int, waiting int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lanes {
		waiting += l.waiting
	}
	return m.moves(), waiting
}

// Reasons for the end of a move without a copy.
var (
	// ErrCancelled means that the entry is gone or that the copy is no longer wanted.
	ErrCancelled = errors.New("store: move is cancelled")
	// ErrRefused means that another host does not take an offered entry.
	ErrRefused = errors.New("store: the offer is refused")
	// ErrBehind means that a level has no room at present: entries that leave have no copy yet, or its memory is still being
	// allocated.
	ErrBehind = errors.New("store: the level has no room yet")
	// ErrLayout means that new pieces of the group have another layout than the entry.
	ErrLayout = errors.New("store: the entry has an earlier layout, which is not written any more")
	// ErrTable means that the table of a piece is too long to be copied in one part. The piece itself is valid.
	ErrTable = errors.New("store: the piece has too many extents to be copied")
)
