package slots

import "github.com/kvhost/kvhost/abi"

// Aging orders the entries of a table by a priority: what an entry is worth at its last use, plus the age of the cache
// then, which is the priority of the last victim. The lowest goes first. The policy counts uses and says what they are worth.
type Aging struct {
	t      *Table
	heap   *Heap
	order  uint64
	age    uint64
	ageing bool
	insert func(*abi.Event)
	use    func(slot uint32) (worth uint64)
}

const ranked List = 1

// NewAging makes an empty order. insert is called for a new entry before its first use; without ageing the age stays 0.
func NewAging(maxSlots uint32, ageing bool, insert func(*abi.Event), use func(uint32) uint64) (*Aging, error) {
	t, err := NewTable(maxSlots, 0, ranked)
	if err != nil {
		return nil, err
	}
	return &Aging{t: t, heap: NewHeap(maxSlots), ageing: ageing, insert: insert, use: use}, nil
}

// At is the entry of a slot.
func (a *Aging) At(slot uint32) *Entry { return a.t.At(slot) }

// Events applies a batch.
func (a *Aging) Events(batch []abi.Event) {
	a.heap.Begin()
	a.t.Apply(batch, a)
}

// Touch is a use.
func (a *Aging) Touch(slot uint32) {
	a.order++
	a.heap.Set(slot, Rank{Priority: a.age + a.use(slot), Order: a.order})
}

// Insert is a first use.
func (a *Aging) Insert(ev *abi.Event) {
	a.t.Insert(ev, ranked)
	a.insert(ev)
	a.Touch(ev.Slot)
}

// Remove forgets an entry. The age follows from what was evicted.
func (a *Aging) Remove(slot uint32) {
	if a.ageing && a.t.Evicted(slot) {
		a.age = max(a.age, a.heap.Rank(slot).Priority)
	}
	a.heap.Delete(slot)
	a.t.Remove(slot)
}

// Victims names the entries of lowest priority.
func (a *Aging) Victims(ask abi.Ask, dst []uint32) int {
	n := a.t.Ask(ask, dst)
	a.heap.Lowest(&n)
	return n.Count()
}
