package slots

import "github.com/kvhost/kvhost/abi"

// Naming is the answer to one question for victims while it is being made. Naming an entry does not move it: it stays
// in its list until the host removes it, and if the host keeps it, it is where it was. Within one question an entry
// is named at most once, and [Naming.Left] counts a list as if what was named were gone.
//
// Its work is bounded, because the host bounds what a call may execute: it takes maxSteps steps at most and then names
// fewer than were asked for, and after patience steps entries are no longer spared for having been used.
type Naming struct {
	t      *Table
	dst    []uint32
	n      int
	steps  uint32
	spared uint32
	want   uint64 // units
	got    uint64
	tenant uint32
}

// Ask starts an answer in dst.
func (t *Table) Ask(ask abi.Ask, dst []uint32) Naming {
	t.asks++
	if t.asks == 0 { // wrapped: 0 means never
		t.asks = 1
	}
	for l := range t.sums {
		t.sums[l].named = 0
	}
	if uint64(len(dst)) > uint64(ask.MaxVictims) {
		dst = dst[:ask.MaxVictims]
	}
	want := ask.Bytes / abi.SizeUnit
	if ask.Bytes%abi.SizeUnit != 0 {
		want++
	}
	return Naming{t: t, dst: dst, want: want, tenant: ask.Tenant}
}

const (
	patience   = 400
	maxSteps   = 1040
	spareSteps = 6
	maxSpared  = 4500
)

// More says whether a further step is to be taken: whether victims are wanted and the question is not taking too long.
func (a *Naming) More() bool {
	a.steps++
	return a.got < a.want && a.n < len(a.dst) && a.steps <= maxSteps
}

// Spare takes one off the marks of node i and those before it, towards the front, up to the first node without a mark, and
// answers that, or None. It is a cheap step: spareSteps of its kind count for one.
func (a *Naming) Spare(i uint32) uint32 {
	from := maxSpared - a.spared
	i, left := a.t.spare(i, from)
	a.spared += from - left
	a.steps += (from-left)/spareSteps + 1
	if i >= a.t.ends {
		return None
	}
	return i
}

// spare is a function of its own because the host charges each round of a loop for all of the function around it.
func (t *Table) spare(i, left uint32) (uint32, uint32) {
	for ; i < t.ends && left > 0; left-- {
		n := t.node(i)
		if n.Mark == 0 {
			break
		}
		n.Mark--
		i = n.prev
	}
	return i, left
}

// Hurry makes a step count for many.
func (a *Naming) Hurry(steps uint32) { a.steps += steps }

// Spares says whether [Naming.Spare] may go on: a question spares some thousands.
func (a *Naming) Spares() bool { return a.spared < maxSpared }

// Patient says whether entries may still be spared for having been used.
func (a *Naming) Patient() bool { return a.steps <= patience }

// May says whether a resident entry can be named: it is not pinned, not named yet, and of the tenant asked for.
func (a *Naming) May(slot uint32) bool {
	e := a.t.At(slot)
	return e.pins == 0 && e.named != a.t.asks && (a.tenant == abi.None || e.Tenant == a.tenant)
}

// Name adds a victim.
func (a *Naming) Name(slot uint32) {
	e := a.t.At(slot)
	e.named = a.t.asks
	a.t.sums[e.list%maxLists].named += uint64(e.Size)
	a.got += uint64(e.Size)
	a.dst[a.n] = slot
	a.n++
}

// Left is a list's units without those named.
func (a *Naming) Left(l List) uint64 {
	s := &a.t.sums[l%maxLists]
	return s.units - s.named
}

// Want is how many units are still to be freed.
func (a *Naming) Want() uint64 { return a.want - min(a.want, a.got) }

// Count is how many were named.
func (a *Naming) Count() int { return a.n }

// NameFrom names what it may from node i towards the front of its list, and answers the node it stopped at: None when it
// got to the front.
func (a *Naming) NameFrom(i uint32) uint32 {
	for ; i != None && a.More(); i = a.t.Before(i) {
		if a.May(i) {
			a.Name(i)
		}
	}
	return i
}

// Evicted says whether a slot that is being removed was named: whether it goes because the policy chose it, and not
// because the host dropped it for a reason of its own.
func (t *Table) Evicted(slot uint32) bool { return t.At(slot).named != 0 }
