package slotlist

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

// model is the same order as a plain slice, newest first.
type model struct {
	order  []uint32
	size   map[uint32]uint32
	tenant map[uint32]uint32
	pinned map[uint32]bool
}

func (m *model) apply(ev *abi.Event, touch bool) {
	drop := func() {
		if i := slices.Index(m.order, ev.Slot); i >= 0 {
			m.order = slices.Delete(m.order, i, i+1)
		}
	}
	_, here := m.size[ev.Slot]
	switch ev.Op {
	case abi.OpInsert, abi.OpResident:
		drop()
		m.order = slices.Insert(m.order, 0, ev.Slot)
		m.size[ev.Slot], m.tenant[ev.Slot], m.pinned[ev.Slot] = ev.Size, ev.Tenant, false
	case abi.OpTouch:
		if here && touch {
			drop()
			m.order = slices.Insert(m.order, 0, ev.Slot)
		}
	case abi.OpRemove:
		drop()
		delete(m.size, ev.Slot)
		delete(m.pinned, ev.Slot)
	case abi.OpPin, abi.OpUnpin:
		if here {
			m.pinned[ev.Slot] = ev.Op == abi.OpPin
		}
	}
}

func (m *model) victims(ask abi.Ask) (out []uint32) {
	var freed uint64
	for _, s := range slices.Backward(m.order) {
		if uint32(len(out)) == ask.MaxVictims || freed >= ask.Bytes {
			break
		}
		if m.pinned[s] || (ask.Tenant != abi.None && m.tenant[s] != ask.Tenant) {
			continue
		}
		out = append(out, s)
		freed += uint64(m.size[s]) * abi.SizeUnit
	}
	return out
}

func TestListAgreesWithModel(t *testing.T) {
	for _, touch := range []bool{true, false} {
		for seed := range uint64(20) {
			rng := rand.New(rand.NewPCG(seed, 2))
			slots := 1 + rng.Uint32N(40)
			l := New(slots)
			m := model{size: map[uint32]uint32{}, tenant: map[uint32]uint32{}, pinned: map[uint32]bool{}}
			for step := range 3000 {
				batch := make([]abi.Event, rng.IntN(5))
				for i := range batch {
					batch[i] = abi.Event{ // illegal ones too: slots that are out of range, not there, or there already
						Op: abi.Op(rng.IntN(10)), Slot: rng.Uint32N(slots + 2), Size: rng.Uint32N(5), Tenant: rng.Uint32N(3),
					}
					if batch[i].Slot < slots {
						m.apply(&batch[i], touch)
					}
				}
				l.Apply(batch, touch)
				ask := abi.Ask{Bytes: rng.Uint64N(20) * abi.SizeUnit, MaxVictims: rng.Uint32N(8), Tenant: abi.None}
				if rng.IntN(2) == 0 {
					ask.Tenant = rng.Uint32N(4)
				}
				dst := make([]uint32, 8)
				if got, want := dst[:l.Victims(ask, dst)], m.victims(ask); !slices.Equal(got, want) {
					t.Fatalf("seed %d step %d %+v: got %v, want %v", seed, step, ask, got, want)
				}
			}
		}
	}
}

func TestPinnedRunIsWalkedOnce(t *testing.T) {
	const slots = 10000
	l := New(slots)
	for s := range uint32(slots) {
		l.Apply([]abi.Event{{Op: abi.OpInsert, Slot: s, Size: 1}}, true)
		if s < slots-1 {
			l.Apply([]abi.Event{{Op: abi.OpPin, Slot: s}}, true)
		}
	}
	dst := make([]uint32, 1)
	ask := abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: abi.None}
	for range slots / maxPassed {
		if n := l.Victims(ask, dst); n != 0 {
			t.Errorf("a call passed over more than %d slots", maxPassed)
		}
	}
	l.Victims(ask, dst)
	if l.done != slots-2 {
		t.Errorf("the walk would start again at slot %d", l.done)
	}
	l.Apply([]abi.Event{{Op: abi.OpUnpin, Slot: 5}}, true)
	if n := l.Victims(ask, dst); n != 1 || dst[0] != 5 {
		t.Errorf("after its unpin slot 5 is the oldest: got %d %v", n, dst)
	}
}
