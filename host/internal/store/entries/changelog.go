package entries

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

// ChangeKind is the kind of a change of an entry.
type ChangeKind uint8

const (
	Stored  ChangeKind = 1 // all pieces are present
	Evicted ChangeKind = 2 // the entry can no longer be loaded
)

type Change struct {
	Seq       uint64 // 0 in a snapshot
	Kind      ChangeKind
	Group     uint32
	Namespace kv.Digest
	Key       kv.Key
	Parent    kv.Key // for Stored: kv.Root if the entry has no parent or the parent is unknown
}

// ErrLost means that the log no longer holds the changes after a sequence number, or that it was reset.
var ErrLost = errors.New("entries: changes were lost")

// ChangeLog is the bounded log of entries that become resident and of those that leave. A reader can resume after a sequence
// number as long as the log holds the following changes. Otherwise it must start again from a snapshot. The log records
// nothing, and costs nothing, until Start is called. It is safe for concurrent use.
type ChangeLog struct {
	size int
	on   atomic.Bool

	mu    sync.Mutex
	ring  []Change
	first uint64 // sequence number of the oldest change in the log
	next  uint64
	wake  chan struct{} // closed when a change is added
}

// NewChangeLog returns a log that holds at most size changes.
func NewChangeLog(size int) *ChangeLog {
	return &ChangeLog{size: size, first: 1, next: 1, wake: make(chan struct{})}
}

// On reports whether changes are recorded.
func (l *ChangeLog) On() bool { return l.on.Load() }

// Start begins to record unless the log is recording already, and returns the number of the latest change. The caller should
// then take a snapshot, and read the changes after that number.
func (l *ChangeLog) Start() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ring == nil {
		l.ring = make([]Change, l.size)
		l.on.Store(true)
	}
	return l.next - 1
}

func (l *ChangeLog) Add(c Change) {
	if !l.on.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	c.Seq = l.next
	l.ring[c.Seq%uint64(l.size)] = c
	l.next++
	l.first = max(l.first, l.next-min(l.next, uint64(l.size)))
	l.notify()
}

// Reset forgets all changes, so that every reader must take a new snapshot.
func (l *ChangeLog) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next++
	l.first = l.next
	l.notify()
}

func (l *ChangeLog) notify() {
	close(l.wake)
	l.wake = make(chan struct{})
}

// Read appends the changes after a sequence number to dst, as many as fit its capacity. If it appends none, the caller can wait
// for wake, which is closed at the next change.
func (l *ChangeLog) Read(after uint64, dst []Change) (_ []Change, wake <-chan struct{}, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ring == nil || after+1 < l.first || after >= l.next {
		return dst, nil, ErrLost
	}
	for seq := after + 1; seq < l.next && len(dst) < cap(dst); seq++ {
		dst = append(dst, l.ring[seq%uint64(l.size)])
	}
	return dst, l.wake, nil
}

// SnapshotStep is the number of slots that one call of Snapshot visits.
const SnapshotStep = 1024

// Snapshot appends the resident entries of some slots, and reports whether there are further slots. It takes the lock.
func (s *Set) Snapshot(from uint32, batch []Change) (_ []Change, more bool) {
	s.Lock()
	defer s.Unlock()
	end := min(from+SnapshotStep, s.Index.High())
	for slot := from; slot < end; slot++ {
		if e := s.Index.At(slot); e.Is(index.Live) && e.Is(index.Complete) && !e.Any(index.Evicting|index.Detached) {
			batch = append(batch, s.change(Stored, slot, kv.Root))
		}
	}
	return batch, end < s.Index.High()
}

func (s *Set) change(kind ChangeKind, slot uint32, parent kv.Key) Change {
	cl := s.ClassOf(slot)
	return Change{
		Kind: kind, Namespace: cl.Namespace.Digest, Group: cl.Group, Key: s.Index.Key(slot), Parent: parent,
	}
}

// completed counts an entry that has become complete.
func (s *Set) completed(slot uint32, parent kv.Key) {
	s.complete++
	if first := s.cfg.Copies == nil || s.cfg.Copies.add(s.Index.Fingerprint(slot), s); first && s.cfg.Changes.On() {
		s.cfg.Changes.Add(s.change(Stored, slot, parent))
	}
}

// uncompleted counts a complete entry that leaves.
func (s *Set) uncompleted(slot uint32) {
	s.complete--
	if last := s.cfg.Copies == nil || s.cfg.Copies.remove(s.Index.Fingerprint(slot), s); last && s.cfg.Changes.On() {
		s.cfg.Changes.Add(s.change(Evicted, slot, kv.Root))
	}
}

// Copies counts the copies of entries that are complete in several roots. Readers of changes thereby see one Stored for the
// first copy, and one Evicted when the last copy leaves. An entry that is not counted has at most one copy. Its lock is taken
// after the locks of sets.
type Copies struct {
	mu   sync.Mutex
	of   map[uint64]copies // by fingerprint
	kept int               // entries with copies both in volatile sets and in others
}

type copies struct {
	complete int
	volatile int // the part of complete in volatile sets
	makers   int // puts and moves that may add a copy
}

func (n copies) kept() int {
	if n.volatile > 0 && n.complete > n.volatile {
		return 1
	}
	return 0
}

func NewCopies() *Copies { return &Copies{of: map[uint64]copies{}} }

// volatile returns 1 if the copies in the set are lost when the host stops, and 0 otherwise.
func (c *Config) volatile() int {
	if c.Volatile {
		return 1
	}
	return 0
}

// Kept returns the number of entries with copies both in volatile sets and in others.
func (c *Copies) Kept() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.kept
}

// Several reports whether an entry has more than one copy.
func (c *Copies) Several(fp uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.of[fp].complete > 1
}

// Watch begins to count the copies of an entry. They are counted until Unwatch and as long as there are two. The entry must be
// complete in s, and the lock of s must be held.
func (c *Copies) Watch(fp uint64, s *Set) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.of[fp]
	if !ok {
		n.complete, n.volatile = 1, s.cfg.volatile()
	}
	n.makers++
	c.set(fp, n)
}

func (c *Copies) Unwatch(fp uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.of[fp]
	n.makers--
	c.set(fp, n)
}

// add counts a copy and reports whether it is the first.
func (c *Copies) add(fp uint64, s *Set) bool { return c.count(fp, 1, s) == 1 }

// remove counts a copy that leaves and reports whether it was the last.
func (c *Copies) remove(fp uint64, s *Set) bool { return c.count(fp, -1, s) == 0 }

// count changes the number of copies and returns it.
func (c *Copies) count(fp uint64, diff int, s *Set) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.of[fp]
	if !ok {
		return max(0, diff)
	}
	n.complete += diff
	n.volatile += diff * s.cfg.volatile()
	c.set(fp, n)
	return n.complete
}

func (c *Copies) set(fp uint64, n copies) {
	c.kept += n.kept() - c.of[fp].kept()
	if n.makers == 0 && n.complete <= 1 {
		delete(c.of, fp)
		return
	}
	c.of[fp] = n
}

// countedStep is the number of slots that CountCopies visits while it holds the locks.
const countedStep = 256

// CountCopies finds the entries that are complete in several sets with the same Copies. It is called after a scan and when a
// root returns to service. It takes the locks of all sets, in their order, for a few entries at a time.
func CountCopies(sets []*Set) {
	largest, most := 0, uint32(0)
	for i, s := range sets {
		s.Lock()
		if n := s.Index.Len(); n > most {
			largest, most = i, n
		}
		s.Unlock()
	}
	for i, s := range sets {
		for from, more := uint32(0), i != largest; more; from += countedStep {
			more = countCopies(s, sets, from)
		}
	}
}

// countCopies counts the copies of the entries in some slots, and reports whether there are further slots.
func countCopies(s *Set, sets []*Set, from uint32) (more bool) {
	for _, o := range sets {
		o.Lock()
		defer o.Unlock()
	}
	end := min(from+countedStep, s.Index.High())
	for slot := from; slot < end; slot++ {
		if e := s.Index.At(slot); !e.Is(index.Live|index.Complete) || e.Any(index.Evicting|index.Detached) {
			continue
		}
		fp, n := s.Index.Fingerprint(slot), copies{}
		for _, o := range sets {
			if at := o.Index.FindFingerprint(fp); at != index.None && o.Index.At(at).Is(index.Complete) &&
				!o.Index.At(at).Is(index.Evicting) {
				n.complete++
				n.volatile += o.cfg.volatile()
			}
		}
		if n.complete > 1 {
			s.cfg.Copies.found(fp, n)
		}
	}
	return end < s.Index.High()
}

// found corrects the count of an entry.
func (c *Copies) found(fp uint64, n copies) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n.makers = c.of[fp].makers
	c.set(fp, n)
}
