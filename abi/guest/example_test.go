package guest_test

import (
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// fifo evicts in the order of insertion. It allocates in its constructor only.
type fifo struct {
	order  []uint32 // resident slots, oldest first
	pinned []bool   // by slot
}

func newFIFO(info guest.Info) (guest.Evictor, error) {
	return &fifo{order: make([]uint32, 0, info.MaxSlots), pinned: make([]bool, info.MaxSlots)}, nil
}

func (p *fifo) Events(batch []abi.Event) {
	for i := range batch {
		switch e := &batch[i]; e.Op {
		case abi.OpInsert, abi.OpResident:
			p.order, p.pinned[e.Slot] = append(p.order, e.Slot), false
		case abi.OpPin, abi.OpUnpin:
			p.pinned[e.Slot] = e.Op == abi.OpPin
		case abi.OpRemove:
			for at, slot := range p.order {
				if slot == e.Slot {
					p.order = append(p.order[:at], p.order[at+1:]...)
					break
				}
			}
		}
	}
}

func (p *fifo) Victims(_ abi.Ask, dst []uint32) int {
	n := 0
	for _, slot := range p.order {
		if n < len(dst) && !p.pinned[slot] {
			dst[n] = slot
			n++
		}
	}
	return n
}

// A policy is a Go type. It can be tried without WebAssembly: a host would make these calls.
func Example() {
	p, err := newFIFO(guest.Info{MaxSlots: 8})
	if err != nil {
		fmt.Println(err)
		return
	}
	p.Events([]abi.Event{
		{Op: abi.OpInsert, Slot: 3, Size: 1},
		{Op: abi.OpInsert, Slot: 5, Size: 1},
		{Op: abi.OpInsert, Slot: 1, Size: 1},
		{Op: abi.OpPin, Slot: 3},
	})
	victims := make([]uint32, 2)
	n := p.Victims(abi.Ask{Bytes: 2 * abi.SizeUnit, MaxVictims: 2, Tenant: abi.None}, victims)
	fmt.Println(victims[:n])
	// Output: [5 1]
}
