package shared

import (
	"fmt"
	"sync"

	"github.com/kvhost/kvhost/staging"
)

// credits is the account of the bytes that a member may write: granted less returned less spent. A put takes credit before it
// writes. It returns unused credit once its bytes are gone from the disk.
type credits struct {
	fresh func() bool
	wake  func()

	mu       sync.Mutex
	current  uint64 // incarnation; credit taken by an earlier one is void
	granted  int64
	returned int64
	spent    int64 // bytes of puts in flight and of published pieces
	flying   int64 // part of spent that puts in flight hold
	held     int64 // credit of puts in flight from earlier incarnations, which may have unlinked files open
	largest  int64 // largest request so far
	taken    int64 // bytes taken since the last step
	starved  int64 // largest refused request since the last step
	want     int64 // the free credit that this member would like to have
	refused  uint64
	arrived  staging.Signal // sent when credit arrives
}

// Credit permits its holder to write a number of bytes. It is valid during the incarnation that took it.
type Credit struct {
	bytes int64
	life  uint64
}

func (c Credit) Bytes() int64 { return c.bytes }

// init sets the functions that report whether credit may be taken and used, and that request a step if there is too little.
func (c *credits) init(fresh func() bool, wake func()) { c.fresh, c.wake = fresh, wake }

func (c *credits) free() int64 { return c.granted - c.returned - c.spent }

// reset ends an incarnation and begins the account of the next one, life. life is 0 if there is none.
func (c *credits) reset(life uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held += c.flying
	c.current, c.granted, c.returned, c.spent, c.flying = life, 0, 0, 0, 0
}

// spend turns the credit of a put in flight into a published piece of the given bytes. It returns false if the credit is void.
func (c *credits) spend(credit Credit, bytes int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if credit.life != c.current {
		return false
	}
	c.spent += bytes - credit.bytes
	c.flying -= credit.bytes
	return true
}

func (c *credits) valid(credit Credit) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return credit.life != 0 && credit.life == c.current
}

// Take reserves credit. It returns false if this member has less free credit, or may not take any now.
func (c *credits) Take(bytes int64) (Credit, bool) {
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

// Holds reports whether the credit may be used now. It is checked before each operation on a temporary, since the credit of an
// incarnation that was fenced is void.
func (c *credits) Holds(credit Credit) bool { return c.fresh() && c.valid(credit) }

// Give returns unspent credit. The bytes must be gone from the disk, and the file must be closed.
func (c *credits) Give(credit Credit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if credit.life != c.current {
		c.held -= credit.bytes
		return
	}
	c.spent -= credit.bytes
	c.flying -= credit.bytes
	c.arrived.Send()
}

// More returns a channel that is closed when this member receives credit.
func (c *credits) More() <-chan struct{} { return c.arrived.Next() }

// grant records the total credit granted by the evictor.
func (c *credits) grant(granted int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if granted > c.granted {
		c.granted = granted
		c.arrived.Send()
	}
}

// claim is the state of a member's credit as it reports it to the evictor.
type claim struct {
	Returned int64 `json:"returned"`
	Free     int64 `json:"free"` // free credit in bytes; negative if more than the granted credit is spent
	Want     int64 `json:"want"`
	Held     int64 `json:"held"` // bytes that puts of earlier incarnations may hold in unlinked files
}

// check returns ErrDamaged if a value is outside the range of the protocol.
func (c *claim) check() error {
	if min(c.Returned, c.Held, c.Want) < 0 || c.Free < -mostBytes || c.Returned > mostTotal || max(c.Held, c.Want, c.Free) > mostBytes {
		return fmt.Errorf("%w: a claim of %+v", ErrDamaged, *c)
	}
	return nil
}

// short returns the credit that the member lacks.
func (c *claim) short() int64 { return max(0, c.Want-c.Free) }

// settle is called once per step. It computes the free credit that this member wants, and returns the excess to the evictor. It
// wants several times the use of the last step, because the next grant takes several steps. An unused wish decays.
func (c *credits) settle(most int64) claim {
	c.mu.Lock()
	defer c.mu.Unlock()
	least := max(4*c.largest, most/16) // A host that has stored nothing yet does not have to wait for its first credit.
	c.want = max(least, c.want-c.want/8, 8*(c.taken+c.starved))
	c.want = min(c.want, max(most, c.largest))
	c.taken, c.starved = 0, 0
	if extra := c.free() - c.want; extra > 0 {
		c.returned += extra
	}
	return claim{c.returned, c.free(), c.want, c.held}
}

// tell fills in the credit fields of s.
func (c *credits) tell(s *Stats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Granted, s.Free, s.Want, s.Held, s.Refused = c.granted, c.free(), c.want, c.held, c.refused
}
