package shared

import "sync"

// credits is the account of bytes that this member may write: granted less returned less spent. A put takes credit
// before it writes, and gives back what it did not publish after its bytes are gone from the disk.
type credits struct {
	mu       sync.Mutex
	life     uint64 // incarnation: credit of an earlier one is void
	granted  int64
	returned int64
	spent    int64 // by puts in flight and published pieces
	largest  int64 // largest request so far
	taken    int64 // since the last step
	starved  int64 // largest refused request since the last step
	want     int64 // the free credit that this member would like to have
	refused  uint64
	changed  chan struct{} // closed and replaced when credit arrives
}

// Credit allows its holder to write a number of bytes.
type Credit struct {
	bytes int64
	life  uint64
}

// Bytes returns the amount.
func (c Credit) Bytes() int64 { return c.bytes }

func (c *credits) free() int64 { return c.granted - c.returned - c.spent }

func (c *credits) reset(life uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.life, c.granted, c.returned, c.spent = life, 0, 0, 0
}

// Take reserves credit for this many bytes; ok is false when this member has less.
func (m *Member) Take(bytes int64) (Credit, bool) {
	if !m.Fresh() {
		return Credit{}, false
	}
	c := &m.credits
	c.mu.Lock()
	defer c.mu.Unlock()
	c.largest = max(c.largest, bytes)
	if c.free() < bytes {
		c.starved = max(c.starved, bytes)
		c.refused++
		m.Wake()
		return Credit{}, false
	}
	c.spent += bytes
	c.taken += bytes
	return Credit{bytes, c.life}, true
}

// Give returns unspent credit. Its bytes must be gone from the disk.
func (m *Member) Give(credit Credit) {
	c := &m.credits
	c.mu.Lock()
	defer c.mu.Unlock()
	if credit.life == c.life {
		c.spent -= credit.bytes
		c.notify()
	}
}

// More returns a channel that is closed when this member receives credit.
func (m *Member) More() <-chan struct{} {
	c := &m.credits
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changed == nil {
		c.changed = make(chan struct{})
	}
	return c.changed
}

func (c *credits) notify() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// grant records the total that was granted.
func (c *credits) grant(granted int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if granted > c.granted {
		c.granted = granted
		c.notify()
	}
}

// settle computes once per step how much free credit this member wants, and returns the excess. It wants several times
// what the last step used, because the next grant is steps away; an unused wish decays.
func (c *credits) settle(most int64) (returned, free, want int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	least := max(4*c.largest, most/16) // a host that has stored nothing yet need not wait for its first credit
	c.want = max(least, c.want-c.want/8, 8*(c.taken+c.starved))
	c.want = min(c.want, max(most, c.largest))
	c.taken, c.starved = 0, 0
	if extra := c.free() - c.want; extra > 0 {
		c.returned += extra
	}
	return c.returned, c.free(), c.want
}
