package slotlist

import (
	"errors"
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

func randomEvent(rng *rand.Rand, slots uint32) abi.Event {
	ops := []abi.Op{abi.OpInsert, abi.OpInsert, abi.OpTouch, abi.OpTouch, abi.OpTouch, abi.OpPin, abi.OpUnpin, abi.OpRemove}
	return abi.Event{Op: ops[rng.IntN(len(ops))], Slot: rng.Uint32N(slots), Size: 1 + rng.Uint32N(5), Tenant: rng.Uint32N(20) / 9}
}

// A list that was saved and loaded, also by one for more slots, answers everything as the first does from then on.
func TestSavedListGoesOn(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 3))
		slots := 1 + rng.Uint32N(40)
		first := New(slots)
		ask := func(l *List, a abi.Ask) []uint32 {
			dst := make([]uint32, 8)
			return dst[:l.Victims(a, dst)]
		}
		question := func() abi.Ask {
			return abi.Ask{Bytes: uint64(rng.IntN(12)) * abi.SizeUnit, MaxVictims: 8, Tenant: []uint32{abi.None, 0, 1}[rng.IntN(3)]}
		}
		for range rng.IntN(200) {
			first.Apply([]abi.Event{randomEvent(rng, slots)}, true)
			if rng.IntN(10) == 0 {
				ask(&first, question())
			}
		}
		state, ok := first.Save([]byte("kept"), 1<<20)
		if !ok || string(state[:4]) != "kept" {
			t.Fatal("not saved")
		}
		state = state[4:]
		if _, ok := first.Save(nil, len(state)); !ok {
			t.Errorf("seed %d: not saved in its %d bytes", seed, len(state))
		}
		if out, ok := first.Save([]byte("kept"), len(state)-1); ok || string(out) != "kept" {
			t.Errorf("seed %d: saved in less than its %d bytes", seed, len(state))
		}
		second := New(slots + rng.Uint32N(3))
		if err := second.Load(state); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for i := range 200 {
			ev, q := randomEvent(rng, slots), question()
			first.Apply([]abi.Event{ev}, true)
			second.Apply([]abi.Event{ev}, true)
			if a, b := ask(&first, q), ask(&second, q); !slices.Equal(a, b) {
				t.Fatalf("seed %d: after %d more events %d, and %d where it was loaded", seed, i, a, b)
			}
		}
	}
}

// Whatever the bytes are, a list that takes them is one, and a list that does not is empty.
func TestStateThatIsNone(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	const slots = 12
	l := New(slots)
	for range 60 {
		l.Apply([]abi.Event{randomEvent(rng, slots)}, true)
	}
	good, _ := l.Save(nil, 1<<20)
	whole := func(l *List) (n int) { // both ways through the list meet
		for at := l.nodes.At(l.root).newer; at != l.root; at = l.nodes.At(at).newer {
			if n++; n > slots || l.nodes.At(l.nodes.At(at).newer).older != at || l.nodes.At(at).state&resident == 0 {
				t.Fatal("not a list")
			}
		}
		return n
	}
	refused := 0
	try := func(b []byte) {
		l := New(slots)
		err := l.Load(b)
		if n := whole(&l); err != nil {
			refused++
			if !errors.Is(err, ErrState) || n != 0 || l.done != l.root {
				t.Fatalf("got %v, with %d slots", err, n)
			}
		}
		for range 50 {
			l.Apply([]abi.Event{randomEvent(rng, slots)}, true)
			l.Victims(abi.Ask{Bytes: 1 << 20, MaxVictims: 4, Tenant: abi.None}, make([]uint32, 4))
		}
		whole(&l)
	}
	for n := range good {
		try(good[:n])
	}
	if refused != len(good) {
		t.Errorf("%d of %d parts of a state were refused", refused, len(good))
	}
	for range 30_000 {
		bad := slices.Clone(good)
		for range 1 + rng.IntN(3) {
			bad[rng.IntN(len(bad))] = byte(rng.UintN(256) & (1<<(1+rng.UintN(8)) - 1))
		}
		try(bad)
	}
	small := New(slots - 6)
	if err := small.Load(good); !errors.Is(err, ErrState) {
		t.Errorf("loading the state into fewer slots: got %v, want %v", err, ErrState)
	}
}
