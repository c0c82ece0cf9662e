package shared

import (
	"fmt"
	"sync"
)

// Credits is the account of bytes that a member may write: granted less returned less spent. A put takes credit
// before it writes, and gives back what it did not publish after its bytes are gone from the disk.
type Credits struct {
	fresh func() bool
	wake  func()

	mu       sync.Mutex
	current  uint64 // incarnation: credit of an earlier one is void
	granted  int64
	returned int64
	spent    int64 // by puts in flight and published pieces
	flying   int64 // of spent: by puts in flight
	held     int64 // by puts in flight of earlier incarnations: they may have files open that have no name any more
	largest  int64 // largest request so far
	taken    int64 // since the last step
	starved  int64 // largest refused request since the last step
	want     int64 // the free credit that this member would like to have
	refused  uint64
	changed  chan struct{} // closed and replaced when credit arrives
}

// Credit allows its holder to write a number of bytes, for as long as the incarnation lasts that took it.
type Credit struct {
	bytes int64
	life  uint64
}

func (c Credit) Bytes() int64 { return c.bytes }

// Init says when credit may be taken and written on, and what is called when there is too little.
func (c *Credits) Init(fresh func() bool, wake func()) { c.fresh, c.wake = fresh, wake }

func (c *Credits) free() int64 { return c.granted - c.returned - c.spent }

// Reset ends an incarnation, and begins the account of another one; 0: there is none.
func (c *Credits) Reset(life uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held += c.flying
	c.current, c.granted, c.returned, c.spent, c.flying = life, 0, 0, 0, 0
}

// Spend turns a put in flight into a published piece. It is false when the credit is void.
func (c *Credits) Spend(credit Credit, bytes int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if credit.life != c.current {
		return false
	}
	c.spent += bytes - credit.bytes
	c.flying -= credit.bytes
	return true
}

func (c *Credits) valid(credit Credit) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return credit.life != 0 && credit.life == c.current
}

// Take reserves credit for this many bytes; ok is false when this member has less.
func (c *Credits) Take(bytes int64) (Credit, bool) {
	if !c.fresh() {
		return Credit{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.largest = max(c.largest, bytes)
	if c.free() < bytes {
		c.starved = max(c.starved, bytes)
		c.refused++
		c.wake()
		return Credit{}, false
	}
	c.spent += bytes
	c.flying += bytes
	c.taken += bytes
	return Credit{bytes, c.current}, true
}

// Holds reports whether credit may be written on now. It is checked before each operation on a temporary: what the other
// hosts gave up with an earlier incarnation is void.
func (c *Credits) Holds(credit Credit) bool { return c.fresh() && c.valid(credit) }

// Give returns unspent credit. Its bytes must be gone from the disk, and its file closed.
func (c *Credits) Give(credit Credit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if credit.life != c.current {
		c.held -= credit.bytes
		return
	}
	c.spent -= credit.bytes
	c.flying -= credit.bytes
	c.notify()
}

// More returns a channel that is closed when this member receives credit.
func (c *Credits) More() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changed == nil {
		c.changed = make(chan struct{})
	}
	return c.changed
}

func (c *Credits) notify() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// Grant records the total that was granted.
func (c *Credits) Grant(granted int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if granted > c.granted {
		c.granted = granted
		c.notify()
	}
}

// Claim is what a member tells the evictor of its credit.
type Claim struct {
	Returned int64 `json:"returned"`
	Free     int64 `json:"free"` // credit
	Want     int64 `json:"want"`
	Held     int64 `json:"held"` // bytes that puts of earlier incarnations may have in files without a name
}

// Check says what no member can have told.
func (c *Claim) Check() error {
	if min(c.Returned, c.Held, c.Want) < 0 || c.Free < -mostBytes || c.Returned > mostTotal || max(c.Held, c.Want, c.Free) > mostBytes {
		return fmt.Errorf("%w: a claim of %+v", ErrDamaged, *c)
	}
	return nil
}

// Short is how much more credit the member wants than it has.
func (c *Claim) Short() int64 { return max(0, c.Want-c.Free) }

// Settle computes once per step how much free credit this member wants, and returns the excess. It wants several times
// what the last step used, because the next grant is steps away; an unused wish decays.
func (c *Credits) Settle(most int64) Claim {
	c.mu.Lock()
	defer c.mu.Unlock()
	least := max(4*c.largest, most/16) // a host that has stored nothing yet need not wait for its first credit
	c.want = max(least, c.want-c.want/8, 8*(c.taken+c.starved))
	c.want = min(c.want, max(most, c.largest))
	c.taken, c.starved = 0, 0
	if extra := c.free() - c.want; extra > 0 {
		c.returned += extra
	}
	return Claim{c.returned, c.free(), c.want, c.held}
}

// Tell adds the account's figures to those of a member.
func (c *Credits) Tell(s *Stats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Granted, s.Free, s.Want, s.Held, s.Refused = c.granted, c.free(), c.want, c.held, c.refused
}
