package slots

// Rank orders a heap: the lowest priority first, among equals the one that got it first.
type Rank struct{ Priority, Order uint64 }

func (a Rank) less(b Rank) bool {
	return a.Priority < b.Priority || a.Priority == b.Priority && a.Order < b.Order
}

// Heap is a binary heap of slots by rank.
//
// [Heap.Pass] takes the first slot out of sight without forgetting it, so that a question for victims can look at one
// after the other; [Heap.Restore] brings all of them back.
type Heap struct {
	ranks []Rank   // by slot
	place []uint32 // by slot, in order; None when absent
	order []uint32 // slots; the heap, then those passed
	n     int      // of the heap
}

// NewHeap makes room for slots below maxSlots.
func NewHeap(maxSlots uint32) *Heap {
	h := &Heap{ranks: make([]Rank, maxSlots), place: make([]uint32, maxSlots), order: make([]uint32, 0, maxSlots)}
	for i := range h.place {
		h.place[i] = None
	}
	return h
}

// Rank is the rank of a slot in the heap.
func (h *Heap) Rank(slot uint32) Rank { return h.ranks[slot] }

// First is the slot with the lowest rank, or None.
func (h *Heap) First() uint32 {
	if h.n == 0 {
		return None
	}
	return h.order[0]
}

// Set adds a slot or gives it another rank. Nothing may be passed at the time.
func (h *Heap) Set(slot uint32, r Rank) {
	h.ranks[slot] = r
	if h.place[slot] == None {
		h.order = append(h.order, slot)
		h.place[slot] = uint32(h.n)
		h.n++
		h.up(h.n - 1)
		return
	}
	at := int(h.place[slot])
	h.up(at)
	h.down(int(h.place[slot]))
}

// Delete takes a slot out. Nothing may be passed at the time.
func (h *Heap) Delete(slot uint32) {
	at := h.place[slot]
	if at == None {
		return
	}
	h.n--
	h.swap(int(at), h.n)
	h.order = h.order[:h.n]
	h.place[slot] = None
	if int(at) < h.n {
		moved := h.order[at]
		h.up(int(at))
		h.down(int(h.place[moved]))
	}
}

// Pass hides the first slot.
func (h *Heap) Pass() {
	h.n--
	h.swap(0, h.n)
	h.down(0)
}

// Restore brings back what was passed.
func (h *Heap) Restore() {
	for h.n < len(h.order) {
		h.n++
		h.up(h.n - 1)
	}
}

func (h *Heap) swap(a, b int) {
	x, y := h.order[a], h.order[b]
	h.order[a], h.order[b] = y, x
	h.place[x], h.place[y] = uint32(b), uint32(a)
}

func (h *Heap) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.ranks[h.order[i]].less(h.ranks[h.order[parent]]) {
			return
		}
		h.swap(i, parent)
		i = parent
	}
}

func (h *Heap) down(i int) {
	for {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < h.n; c++ {
			if h.ranks[h.order[c]].less(h.ranks[h.order[least]]) {
				least = c
			}
		}
		if least == i {
			return
		}
		h.swap(i, least)
		i = least
	}
}
