package policytest

import "container/list"

// order is a list of keys with an index: the front is the newest.
type order struct {
	l  *list.List
	at map[uint64]*list.Element
}

func newOrder() *order { return &order{l: list.New(), at: map[uint64]*list.Element{}} }

func (o *order) has(key uint64) bool { return o.at[key] != nil }
func (o *order) len() int            { return o.l.Len() }
func (o *order) push(key uint64)     { o.at[key] = o.l.PushFront(key) }
func (o *order) oldest() uint64      { return o.l.Back().Value.(uint64) }

func (o *order) remove(key uint64) {
	o.l.Remove(o.at[key])
	delete(o.at, key)
}

func (o *order) pop() uint64 {
	key := o.oldest()
	o.remove(key)
	return key
}

func (o *order) renew(key uint64) {
	o.remove(key)
	o.push(key)
}

// Sketch counts uses approximately.
type Sketch interface {
	Add(key uint64, resident int)
	Count(key uint64) uint64
}

// wtinylfu has a window of fixed size.
type wtinylfu struct {
	window, probation, protected *order
	sketch                       Sketch
	w, prot, all                 int
}

// WTinyLFU is W-TinyLFU with a window of 1 %, one entry at least, and main split 20 to 80.
func WTinyLFU(sketch func(capacity int) Sketch) func(int) Textbook {
	return func(capacity int) Textbook {
		w := max(1, capacity/100)
		return &wtinylfu{newOrder(), newOrder(), newOrder(), sketch(capacity), w, (capacity - w) * 80 / 100, capacity}
	}
}

func (c *wtinylfu) len() int { return c.window.len() + c.probation.len() + c.protected.len() }

func (c *wtinylfu) Access(key uint64) (bool, []uint64) {
	hit := c.window.has(key) || c.probation.has(key) || c.protected.has(key)
	var gone []uint64
	if !hit && c.len() == c.all {
		gone = []uint64{c.evict()}
	}
	c.sketch.Add(key, c.len())
	switch {
	case !hit:
		c.window.push(key)
		if c.window.len() > c.w && c.window.len() > 1 {
			c.probation.push(c.window.pop())
		}
	case c.window.has(key):
		c.window.renew(key)
	case c.protected.has(key):
		c.protected.renew(key)
	default:
		c.probation.remove(key)
		c.protected.push(key)
		if c.protected.len() > c.prot {
			c.probation.push(c.protected.pop())
		}
	}
	return hit, gone
}

func (c *wtinylfu) evict() uint64 {
	from := c.probation
	if from.len() == 0 {
		from = c.protected
	}
	if from.len() == 0 {
		return c.window.pop()
	}
	if c.window.len() >= c.w && c.window.len() > 0 {
		if c.sketch.Count(c.window.oldest()) <= c.sketch.Count(from.oldest()) {
			return c.window.pop()
		}
		gone := from.pop()
		c.probation.push(c.window.pop())
		return gone
	}
	return from.pop()
}
