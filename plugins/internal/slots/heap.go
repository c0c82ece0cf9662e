package slots

// Rank orders a heap: the lowest priority first, among equals the one that got it first.
type Rank struct{ Priority, Order uint64 }

func (a *Rank) less(b *Rank) bool {
	return a.Priority < b.Priority || a.Priority == b.Priority && a.Order < b.Order
}

type item struct {
	Rank
	slot uint32
}

// Heap is a binary heap of slots by rank. Slots are not checked: they are those of a table of the same size.
//
// A question for victims looks at one slot after the other in order of rank, without changing the heap: [Heap.Lowest] keeps
// the edge of what was looked at, at most maxWalk places, which is itself a heap.
type Heap struct {
	items Array[item]
	place Array[uint32] // by slot, where its item is; None when absent
	n     uint32
	edge  [maxWalk]uint32
	wide  uint32
	fell  uint32 // levels, in this batch
}

// maxWalk bounds a walk: each slot looked at adds one place to the edge at most.
const maxWalk = 1024

// NewHeap makes room for slots below maxSlots.
func NewHeap(maxSlots uint32) *Heap {
	return &Heap{items: NewArray(maxSlots, item{}), place: NewArray(maxSlots, None)}
}

func (h *Heap) at(i uint32) *item { return h.items.At(i) }

func (h *Heap) of(slot uint32) *uint32 { return h.place.At(slot) }

// Rank is the rank of a slot that is in the heap.
func (h *Heap) Rank(slot uint32) Rank { return h.at(*h.of(slot)).Rank }

// maxFell bounds the work of one batch, because the host bounds what a call may execute.
const maxFell = 1600

// Begin starts a batch of events.
func (h *Heap) Begin() { h.fell = 0 }

// Set adds a slot or gives it another rank.
func (h *Heap) Set(slot uint32, r Rank) {
	i := *h.place.Make(slot)
	if i == None {
		i = h.n
		h.n++
		h.items.Make(i)
	}
	h.settle(i, slot, r.Priority, r.Order)
}

// Delete takes a slot out.
func (h *Heap) Delete(slot uint32) {
	i := *h.of(slot)
	if i == None {
		return
	}
	*h.of(slot) = None
	h.n--
	if last := h.at(h.n); i < h.n {
		h.settle(i, last.slot, last.Priority, last.Order)
	}
}

// settle finds the place of a slot when place i is free for it: up, or else down. In a batch that has moved slots through
// too many levels already a slot stays where it is, before some that should go first; with its next use it comes right.
func (h *Heap) settle(i, slot uint32, priority, order uint64) {
	up := h.climb(i, priority, order)
	if up == i && h.fell <= maxFell {
		up = h.fall(i, priority, order)
	}
	it := h.at(up)
	it.slot, it.Priority, it.Order = slot, priority, order
	*h.of(slot) = up
}

// climb moves the free place up past all that rank behind. It and fall are functions of their own because the host
// charges each round of a loop for all of the function around it, and a batch of events may run them for each.
func (h *Heap) climb(i uint32, priority, order uint64) uint32 {
	for i > 0 && h.fell <= maxFell {
		up := (i - 1) / 2
		parent := h.at(up)
		if parent.Priority < priority || parent.Priority == priority && parent.Order <= order {
			break
		}
		*h.at(i) = *parent
		*h.of(parent.slot) = i
		i = up
		h.fell++
	}
	return i
}

// fall moves the free place down past all that rank before.
func (h *Heap) fall(i uint32, priority, order uint64) uint32 {
	for {
		down := 2*i + 1
		if down >= h.n {
			return i
		}
		child := h.at(down)
		if down+1 < h.n {
			if other := h.at(down + 1); other.less(&child.Rank) {
				child = other
				down++
			}
		}
		if child.Priority > priority || child.Priority == priority && child.Order >= order {
			return i
		}
		*h.at(i) = *child
		*h.of(child.slot) = i
		i = down
		h.fell++
	}
}

// walkSteps is what looking at one more slot costs, compared with the steps of other policies. It bounds what one question looks
// at.
const walkSteps = 7

// Lowest names the slots of lowest rank that may go.
func (h *Heap) Lowest(a *Naming) {
	h.walk()
	for a.More() {
		slot := h.next()
		if slot == None {
			break
		}
		if a.May(slot) {
			a.Name(slot)
		}
		a.Hurry(walkSteps)
	}
}

// walk starts to look at the slots in order of rank.
func (h *Heap) walk() {
	h.wide = 0
	if h.n > 0 {
		h.edge[0] = 0
		h.wide = 1
	}
}

// next is the next slot of the walk, or None at its end.
func (h *Heap) next() uint32 {
	if h.wide == 0 {
		return None
	}
	i := h.edge[0]
	h.wide--
	h.sink(h.edge[h.wide%maxWalk])
	for child := 2*i + 1; child <= 2*i+2 && child < h.n && h.wide < maxWalk; child++ {
		h.rise(child)
	}
	return h.at(i).slot
}

// sink puts a place at the edge's top and lets it fall.
func (h *Heap) sink(i uint32) {
	at := uint32(0)
	for {
		child := 2*at + 1
		if child >= h.wide {
			break
		}
		if child+1 < h.wide && h.at(h.edge[(child+1)%maxWalk]).less(&h.at(h.edge[child%maxWalk]).Rank) {
			child++
		}
		if !h.at(h.edge[child%maxWalk]).less(&h.at(i).Rank) {
			break
		}
		h.edge[at%maxWalk] = h.edge[child%maxWalk]
		at = child
	}
	h.edge[at%maxWalk] = i
}

// rise adds a place to the edge.
func (h *Heap) rise(i uint32) {
	at := h.wide
	h.wide++
	for at > 0 {
		parent := (at - 1) / 2
		if !h.at(i).less(&h.at(h.edge[parent%maxWalk]).Rank) {
			break
		}
		h.edge[at%maxWalk] = h.edge[parent%maxWalk]
		at = parent
	}
	h.edge[at%maxWalk] = i
}
