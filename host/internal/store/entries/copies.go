package entries

import (
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/index"
)

// Copies counts the copies of entries that are complete in several roots, so that readers of changes hear of an entry
// once: when its first copy becomes resident, and when its last one goes. An entry that is not counted has one copy at
// most. Its lock is taken after those of sets.
type Copies struct {
	mu sync.Mutex
	of map[uint64]copies // by fingerprint
}

type copies struct {
	complete int
	makers   int // that may add a copy
}

// NewCopies makes an empty count.
func NewCopies() *Copies { return &Copies{of: map[uint64]copies{}} }

// Watch counts an entry from now on, until Unwatch and while there are two copies. The caller holds the lock of a set
// in which it is complete.
func (c *Copies) Watch(fp uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.of[fp]
	if !ok {
		n.complete = 1
	}
	n.makers++
	c.of[fp] = n
}

// Unwatch ends one Watch.
func (c *Copies) Unwatch(fp uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.of[fp]
	n.makers--
	c.set(fp, n)
}

// add counts a copy and says whether it is the first.
func (c *Copies) add(fp uint64) bool { return c.count(fp, 1) == 1 }

// remove counts a copy that goes and says whether it was the last.
func (c *Copies) remove(fp uint64) bool { return c.count(fp, -1) == 0 }

// count returns the number of copies afterwards.
func (c *Copies) count(fp uint64, diff int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.of[fp]
	if !ok {
		return max(0, diff)
	}
	n.complete += diff
	c.set(fp, n)
	return n.complete
}

func (c *Copies) set(fp uint64, n copies) {
	if n.makers == 0 && n.complete <= 1 {
		delete(c.of, fp)
		return
	}
	c.of[fp] = n
}

// countedStep is how many slots CountCopies looks at while it holds the locks.
const countedStep = 256

// CountCopies finds the entries that are complete in several sets, which share their count: after a scan, or when a
// root returns to service. It takes the locks of all sets, in their order, a few entries at a time.
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

// countCopies counts the copies of the entries in some slots, and says whether there are slots after them.
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
		fp, n := s.Index.Fingerprint(slot), 0
		for _, o := range sets {
			if at := o.Index.FindFingerprint(fp); at != index.None && o.Index.At(at).Is(index.Complete) &&
				!o.Index.At(at).Is(index.Evicting) {
				n++
			}
		}
		if n > 1 {
			s.cfg.Copies.found(fp, n)
		}
	}
	return end < s.Index.High()
}

// found corrects the count of an entry.
func (c *Copies) found(fp uint64, complete int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.of[fp] = copies{complete, c.of[fp].makers}
}
