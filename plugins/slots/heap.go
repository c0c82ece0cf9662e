package slots

import "unsafe"

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
// [Heap.Pass] takes the first slot out of sight without forgetting it, so that a question for victims can look at one
// after the other; [Heap.Restore] brings all of them back.
type Heap struct {
	items unsafe.Pointer // *item: the heap, then those passed
	place unsafe.Pointer // *uint32: by slot, where its item is; None when absent
	n     uint32         // of the heap
	all   uint32         // with those passed
}

// NewHeap makes room for slots below maxSlots.
func NewHeap(maxSlots uint32) *Heap {
	place := make([]uint32, maxSlots)
	for i := range place {
		place[i] = None
	}
	return &Heap{
		items: unsafe.Pointer(unsafe.SliceData(make([]item, maxSlots))),
		place: unsafe.Pointer(unsafe.SliceData(place)),
	}
}

func (h *Heap) at(i uint32) *item {
	return (*item)(unsafe.Add(h.items, uintptr(i)*unsafe.Sizeof(item{})))
}

func (h *Heap) of(slot uint32) *uint32 { return (*uint32)(unsafe.Add(h.place, uintptr(slot)*4)) }

// put stores an item and notes where.
func (h *Heap) put(i uint32, it *item) {
	*h.at(i) = *it
	*h.of(it.slot) = i
}

// Rank is the rank of a slot that is in the heap.
func (h *Heap) Rank(slot uint32) Rank { return h.at(*h.of(slot)).Rank }

// First is the slot with the lowest rank, or None.
func (h *Heap) First() uint32 {
	if h.n == 0 {
		return None
	}
	return h.at(0).slot
}

// Set adds a slot or gives it another rank. Nothing may be passed at the time.
func (h *Heap) Set(slot uint32, r Rank) {
	i := *h.of(slot)
	if i == None {
		i = h.n
		h.n++
		h.all = h.n
	}
	h.settle(i, item{r, slot})
}

// Delete takes a slot out. Nothing may be passed at the time.
func (h *Heap) Delete(slot uint32) {
	i := *h.of(slot)
	if i == None {
		return
	}
	*h.of(slot) = None
	h.n--
	h.all = h.n
	if i < h.n {
		h.settle(i, *h.at(h.n))
	}
}

// Pass hides the first slot.
func (h *Heap) Pass() {
	first := *h.at(0)
	h.n--
	if last := *h.at(h.n); h.n > 0 {
		h.settle(0, last)
	}
	h.put(h.n, &first)
}

// Restore brings back what was passed.
func (h *Heap) Restore() {
	for h.n < h.all {
		h.n++
		h.settle(h.n-1, *h.at(h.n - 1))
	}
}

// settle finds the place of an item when place i is free for it: up, or else down.
func (h *Heap) settle(i uint32, it item) {
	start := i
	for i > 0 {
		parent := h.at((i - 1) / 2)
		if !it.less(&parent.Rank) {
			break
		}
		h.put(i, parent)
		i = (i - 1) / 2
	}
	if i == start {
		for {
			child := 2*i + 1
			if child >= h.n {
				break
			}
			c := h.at(child)
			if child+1 < h.n {
				if other := h.at(child + 1); other.less(&c.Rank) {
					c = other
					child++
				}
			}
			if !c.less(&it.Rank) {
				break
			}
			h.put(i, c)
			i = child
		}
	}
	h.put(i, &it)
}
