package slots_test

// arc is figure 4 of the paper.
type arcTextbook struct {
	t1, t2, b1, b2 *order
	p, c           int
	early          bool
}

// ARC is the paper's. With early, REPLACE comes first, before the ghosts are looked at, as when victims are asked for
// before the new entry is known.
func ARC(early bool) func(int) Textbook {
	return func(c int) Textbook {
		return &arcTextbook{t1: newOrder(), t2: newOrder(), b1: newOrder(), b2: newOrder(), c: c, early: early}
	}
}

func (a *arcTextbook) replace(inB2 bool) []uint64 {
	if a.t1.len() > 0 && (a.t1.len() > a.p || inB2 && a.t1.len() == a.p) || a.t2.len() == 0 {
		a.b1.push(a.t1.pop())
		return []uint64{a.b1.l.Front().Value.(uint64)}
	}
	a.b2.push(a.t2.pop())
	return []uint64{a.b2.l.Front().Value.(uint64)}
}

func (a *arcTextbook) full() bool { return a.t1.len()+a.t2.len() == a.c }

func (a *arcTextbook) Access(key uint64) (bool, []uint64) {
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
