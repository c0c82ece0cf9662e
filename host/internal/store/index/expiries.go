package index

// Expiries holds the expiry times of entries in seconds since 1970. It takes four bytes for each slot of a block in which an
// entry expires, and none for other blocks.
type Expiries struct {
	blocks []*[blockSlots]uint32
	cursor uint32 // slot that Sweep visits next
}

// Set sets the expiry time of a slot's entry. 0 means never.
func (x *Expiries) Set(slot uint32, at int64) {
	i := int(slot / blockSlots)
	if i >= len(x.blocks) {
		if at == 0 {
			return
		}
		x.blocks = append(x.blocks, make([]*[blockSlots]uint32, i+1-len(x.blocks))...)
	}
	if x.blocks[i] == nil {
		if at == 0 {
			return
		}
		x.blocks[i] = new([blockSlots]uint32)
	}
	x.blocks[i][slot%blockSlots] = uint32(min(max(at, 0), 1<<32-1))
}

// Any reports whether any entry may expire.
func (x *Expiries) Any() bool { return len(x.blocks) > 0 }

// At returns the expiry time of a slot's entry. 0 means never.
func (x *Expiries) At(slot uint32) uint32 {
	i := int(slot / blockSlots)
	if i >= len(x.blocks) || x.blocks[i] == nil {
		return 0
	}
	return x.blocks[i][slot%blockSlots]
}

// Expired reports whether the entry of a slot has expired.
func (x *Expiries) Expired(slot uint32, now int64) bool {
	at := x.At(slot)
	return at != 0 && int64(at) <= now
}

// Sweep visits at most n slots in which an entry may expire. It continues where the last sweep ended, and wraps around. It
// stops when visit returns false.
func (x *Expiries) Sweep(n uint32, visit func(slot uint32) bool) {
	slots := uint32(len(x.blocks)) * blockSlots
	for range min(n, slots) {
		if x.cursor >= slots {
			x.cursor = 0
		}
		if x.blocks[x.cursor/blockSlots] == nil {
			x.cursor += blockSlots
			continue
		}
		slot := x.cursor
		x.cursor++
		if !visit(slot) {
			return
		}
	}
}

// memory returns the size of the times in bytes.
func (x *Expiries) memory() (n int64) {
	for _, b := range x.blocks {
		if b != nil {
			n += int64(len(b)) * 4
		}
	}
	return n + int64(cap(x.blocks))*8
}
