package entries

// Hits counts, by slot, how many lookups have granted an entry since it became resident, 255 at most. A request that
// asks again counts once. The counts are not kept over a restart. The set's lock guards them.
type Hits struct {
	of []uint8 // nil: nothing is counted
}

// Start begins to count.
func (h *Hits) Start() { h.of = []uint8{} }

// Of is the hits of the entry in a slot.
func (h *Hits) Of(slot uint32) uint32 {
	if int(slot) < len(h.of) {
		return uint32(h.of[slot])
	}
	return 0
}

// add counts a hit. There are so many slots.
func (h *Hits) add(slot, slots uint32) {
	if h.of == nil {
		return
	}
	if int(slot) >= len(h.of) {
		h.of = append(h.of, make([]uint8, int(slots)-len(h.of))...)
	}
	if h.of[slot] < 255 {
		h.of[slot]++
	}
}

// forget ends the count of the entry that was in a slot before.
func (h *Hits) forget(slot uint32) {
	if int(slot) < len(h.of) {
		h.of[slot] = 0
	}
}
