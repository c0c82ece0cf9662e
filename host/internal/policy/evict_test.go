package policy

import (
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
)

func TestEvictAllocatesNothing(t *testing.T) {
	for _, m := range []*Module{modules["lru"], natives["lru"]} {
		e := newEvict(t, m, 4096)
		for slot := range uint32(4096) {
			testenv.OK(t, e.Event(abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Size: 1}))
		}
		dst := make([]uint32, 4)
		slot := uint32(0)
		n := testing.AllocsPerRun(200, func() {
			for range 300 {
				slot = (slot + 997) % 4096
				testenv.OK(t, e.Event(abi.Event{Op: abi.OpTouch, Slot: slot}))
			}
			if _, err := e.Victims(abi.Ask{Bytes: 4 * abi.SizeUnit, MaxVictims: 4, Tenant: abi.None}, dst); err != nil {
				t.Fatal(err)
			}
		})
		if n != 0 {
			t.Errorf("%s %s: %v allocations per run", m.Name(), m.Digest(), n)
		}
	}
}
