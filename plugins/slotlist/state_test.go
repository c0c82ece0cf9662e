package slotlist

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

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
