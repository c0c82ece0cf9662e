package slotlist

import (
	"encoding/binary"
	"errors"

	"github.com/kvhost/kvhost/abi"
)

// ErrState means that the bytes are not a saved order, or that it has more slots than the list.
var ErrState = errors.New("slotlist: not a saved order")

// A saved order is a header, followed by 8 bytes for each slot up to the last one in the list: the next older slot, and the state. The
// order is that of the slots and not of the list. It can therefore be copied at the speed of memory. Following the list would miss the
// caches at each slot, and the root waits until saving ends. The tenants follow as runs of equal ones. All numbers are little-endian.
const (
	stateMagic  = 0x31_74_73_6c // "lst1"
	stateHeader = 4 * 4         // magic, slots, done, runs; abi.None stands for the root
	stateSlot   = 2 * 4
	stateRun    = 2 * 4 // number of slots, tenant
)

// Save appends the order to dst, at most limit bytes of it. If that is not enough, ok is false and dst is unchanged.
func (l *List) Save(dst []byte, limit int) (_ []byte, ok bool) {
	slots := l.top
	for slots > 0 && l.nodes.At(slots-1).state == 0 {
		slots--
	}
	start := len(dst)
	if limit < stateHeader || uint64(limit-stateHeader) < uint64(slots)*stateSlot {
		return dst, false
	}
	put := binary.LittleEndian.AppendUint32
	dst = put(put(put(put(dst, stateMagic), slots), l.name(l.done)), 0)
	for i := range slots {
		n := l.nodes.At(i)
		older := abi.None
		if n.state != 0 {
			older = l.name(n.older)
		}
		dst = binary.LittleEndian.AppendUint64(dst, uint64(n.state)<<32|uint64(older))
	}
	runs := uint32(0)
	for at := uint32(0); at < slots; runs++ {
		end := at + 1
		for tenant := l.nodes.At(at).tenant; end < slots && l.nodes.At(end).tenant == tenant; {
			end++
		}
		if len(dst)-start+stateRun > limit {
			return dst[:start], false
		}
		dst = put(put(dst, end-at), l.nodes.At(at).tenant)
		at = end
	}
	binary.LittleEndian.PutUint32(dst[start+12:], runs)
	return dst, true
}

// name returns a slot in its saved form.
func (l *List) name(slot uint32) uint32 {
	if slot == l.root {
		return abi.None
	}
	return slot
}

// Load restores a saved order in an empty list. After an error the list is still empty.
func (l *List) Load(b []byte) error {
	err := l.load(b)
	if err != nil {
		for i := range l.top {
			if l.nodes.Has(i) {
				*l.nodes.At(i) = node{}
			}
		}
		*l.nodes.At(l.root) = node{newer: l.root, older: l.root}
		l.done = l.root
	}
	return err
}

func (l *List) load(b []byte) error {
	u32 := func(at uint64) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	if len(b) < stateHeader || u32(0) != stateMagic {
		return ErrState
	}
	slots, done, runs := u32(4), u32(8), u32(12)
	tenants := stateHeader + uint64(slots)*stateSlot
	if slots > l.root || uint64(len(b)) != tenants+uint64(runs)*stateRun {
		return ErrState
	}
	present := uint32(0)
	for i := range slots {
		at := stateHeader + uint64(i)*stateSlot
		older, state := u32(at), u32(at+4)
		if state == 0 {
			continue
		}
		if state&resident == 0 || state&passed != 0 && state&pinned == 0 || older != abi.None && older >= slots {
			return ErrState
		}
		present++
		n := l.grown(i)
		if n.state = state; older == abi.None {
			older = l.root
		}
		n.older = older
	}
	for i, slot := uint64(0), uint32(0); i < uint64(runs); i++ {
		count, tenant := u32(tenants+i*stateRun), u32(tenants+i*stateRun+4)
		if count > slots-slot {
			return ErrState
		}
		for end := slot + count; slot < end; slot++ {
			if l.nodes.Has(slot) {
				l.nodes.At(slot).tenant = tenant
			}
		}
	}
	return l.close(present, done)
}

// close sets the links in the other direction. It returns an error unless the links are one path through all slots in
// the list.
func (l *List) close(present, done uint32) error {
	const unseen = 1<<32 - 1
	l.nodes.At(l.root).newer = unseen
	for i := range l.top {
		if n := l.nodes.At(i); n.state != 0 {
			n.newer = unseen
		}
	}
	for i := range l.top {
		n := l.nodes.At(i)
		if n.state == 0 {
			continue
		}
		older := l.nodes.At(n.older)
		if n.older != l.root && older.state == 0 || older.newer != unseen {
			return ErrState // two slots have the same next one, or the next one is not in the list
		}
		older.newer = i
	}
	root := l.nodes.At(l.root)
	if present == 0 {
		root.newer, root.older = l.root, l.root
	}
	// Each slot is the next older one of at most one other slot. So the slot that has no newer one is the newest, and
	// there is one path.
	at, steps := root.newer, uint32(0)
	for ; present > 0 && steps < present && at != unseen; steps++ {
		root.older = at
		at = l.nodes.At(at).newer
	}
	if present > 0 && (steps != present || at != unseen) {
		return ErrState
	}
	if present > 0 {
		l.nodes.At(root.older).newer = l.root
	}
	if l.done = l.root; done != abi.None {
		if done >= l.root || l.nodes.At(done).state&passed == 0 {
			return ErrState
		}
		l.done = done
	}
	return nil
}
