package policytest

// arc is figure 4 of the paper.
type arc struct {
	t1, t2, b1, b2 *order
	p, c           int
	early          bool
}

// ARC is the paper's. With early, REPLACE comes first, before the ghosts are looked at, as when victims are asked for
// before the new entry is known.
func ARC(early bool) func(int) Textbook {
	return func(c int) Textbook {
		return &arc{t1: newOrder(), t2: newOrder(), b1: newOrder(), b2: newOrder(), c: c, early: early}
	}
}

func (a *arc) replace(inB2 bool) []uint64 {
	if a.t1.len() > 0 && (a.t1.len() > a.p || inB2 && a.t1.len() == a.p) || a.t2.len() == 0 {
		a.b1.push(a.t1.pop())
		return []uint64{a.b1.l.Front().Value.(uint64)}
	}
	a.b2.push(a.t2.pop())
	return []uint64{a.b2.l.Front().Value.(uint64)}
}

func (a *arc) full() bool { return a.t1.len()+a.t2.len() == a.c }

func (a *arc) Access(key uint64) (bool, []uint64) {
	for _, t := range []*order{a.t1, a.t2} {
		if t.has(key) {
			t.remove(key)
			a.t2.push(key)
			return true, nil
		}
	}
	var gone []uint64
	if a.early && a.full() {
		gone = a.replace(false)
	}
	for _, b := range []*order{a.b1, a.b2} {
		if !b.has(key) {
			continue
		}
		if b == a.b1 {
			a.p = min(a.c, a.p+max(1, a.b2.len()/a.b1.len()))
		} else {
			a.p = max(0, a.p-max(1, a.b1.len()/a.b2.len()))
		}
		if a.full() {
			gone = a.replace(b == a.b2)
		}
		b.remove(key)
		a.t2.push(key)
		return false, gone
	}
	if a.early {
		a.t1.push(key)
		for a.b1.len() > 0 && a.t1.len()+a.b1.len() > a.c {
			a.b1.pop()
		}
		for a.b2.len() > 0 && a.t1.len()+a.t2.len()+a.b1.len()+a.b2.len() > 2*a.c {
			a.b2.pop()
		}
		return false, gone
	}
	switch {
	case a.t1.len()+a.b1.len() == a.c && a.t1.len() < a.c:
		a.b1.pop()
		if a.full() {
			gone = a.replace(false)
		}
	case a.t1.len()+a.b1.len() == a.c:
		gone = []uint64{a.t1.pop()}
	default:
		if a.t1.len()+a.t2.len()+a.b1.len()+a.b2.len() == 2*a.c {
			a.b2.pop()
		}
		if a.full() {
			gone = a.replace(false)
		}
	}
	a.t1.push(key)
	return false, gone
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
