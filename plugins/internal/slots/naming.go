package slots

import "github.com/kvhost/kvhost/abi"

// Naming is an answer with victims that is being made. Naming an entry does not move it. The entry stays at its place
// in its list until the host removes it. Within one answer an entry is named at most once, and [Naming.Left] counts a
// list without the named entries.
//
// The work is limited, because the host limits the work of a call. An answer takes at most maxSteps steps, and then has
// fewer victims than requested. After patience steps, used entries are no longer spared.
type Naming struct {
	t      *Table
	dst    []uint32
	n      int
	steps  uint32
	spared uint32
	want   uint64 // requested units
	got    uint64
	tenant uint32
}

// Ask begins an answer in dst.
func (t *Table) Ask(ask abi.Ask, dst []uint32) Naming {
	t.asks++
	if t.asks == 0 { // after a wrap-around, because 0 means never
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

// More counts a step, and reports whether it may be made: more victims are needed, and the limit of steps is not
// reached.
func (a *Naming) More() bool {
	a.steps++
	return a.got < a.want && a.n < len(a.dst) && a.steps <= maxSteps
}

// Spare removes one mark from node i and from each node before it, towards the front of the list, until it meets a node without
// a mark. It returns that node, or None at the end of the list. Such a step is cheap: spareSteps of them count as one.
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

// spare is a separate function, because the host charges each iteration of a loop for the length of the whole function.
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

// Hurry counts additional steps.
func (a *Naming) Hurry(steps uint32) { a.steps += steps }

// Spares reports whether [Naming.Spare] may continue. One answer spares at most maxSpared nodes.
func (a *Naming) Spares() bool { return a.spared < maxSpared }

// Patient reports whether used entries may still be spared.
func (a *Naming) Patient() bool { return a.steps <= patience }

// May reports whether a resident entry can be named: it is not pinned, not named yet, and belongs to the requested
// tenant.
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

// Left returns the units of a list without the named entries.
func (a *Naming) Left(l List) uint64 {
	s := &a.t.sums[l%maxLists]
	return s.units - s.named
}

// Count returns the number of named entries.
func (a *Naming) Count() int { return a.n }

// NameFrom names entries from node i towards the front of its list, if they can be named. It returns the node at which it
// stopped, or None at the front.
func (a *Naming) NameFrom(i uint32) uint32 {
	for ; i != None && a.More(); i = a.t.Before(i) {
		if a.May(i) {
			a.Name(i)
		}
	}
	return i
}

// Evicted reports whether the entry that is being removed from a slot was named. Otherwise the host removes it for a
// reason of its own.
func (t *Table) Evicted(slot uint32) bool { return t.At(slot).named != 0 }
