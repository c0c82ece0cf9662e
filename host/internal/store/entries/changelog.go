package entries

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/kv"
)

// ChangeKind is what happened to an entry.
type ChangeKind uint8

const (
	Stored  ChangeKind = 1 // all its pieces are there
	Evicted ChangeKind = 2 // it cannot be loaded any more
)

// Change is one record.
type Change struct {
	Seq       uint64 // 0 in a snapshot
	Kind      ChangeKind
	Group     uint32
	Namespace kv.Digest
	Key       kv.Key
	Parent    kv.Key // of a Stored entry, kv.Root if it has none or the store does not know it
}

// ErrLost says that the log does not hold what follows a sequence number any more, or was reset.
var ErrLost = errors.New("entries: changes were lost")

// ChangeLog is the bounded log of what becomes resident in a store and what goes. A reader resumes after a sequence number as long
// as the log still holds what follows; otherwise it starts again from a snapshot. It records nothing, and costs nothing,
// until Start is called. It is safe for concurrent use.
type ChangeLog struct {
	size int
	on   atomic.Bool

	mu    sync.Mutex
	ring  []Change
	first uint64 // sequence number of the oldest change that is held
	next  uint64
	wake  chan struct{} // closed when a change is added
}

// NewChangeLog makes a log that holds at most size changes.
func NewChangeLog(size int) *ChangeLog {
	return &ChangeLog{size: size, first: 1, next: 1, wake: make(chan struct{})}
}

// On reports whether changes are recorded.
func (l *ChangeLog) On() bool { return l.on.Load() }

// Start begins to record, if the log does not yet, and returns the number of the latest change. Take a snapshot after
// it, and read the changes that follow the number.
func (l *ChangeLog) Start() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ring == nil {
		l.ring = make([]Change, l.size)
		l.on.Store(true)
	}
	return l.next - 1
}

// Add records a change.
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

// Reset forgets all changes: every reader has to take a new snapshot.
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

// Read appends the changes after a sequence number to dst, as many as fit its capacity. Without any, wake is closed
// when there is one.
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
