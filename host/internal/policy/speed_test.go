package policy

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// touches is an evict policy with all slots in use that takes full batches of touches in random order.
func touches(b *testing.B, m *Module, slots uint32) func() {
	e := newEvict(b, m, slots)
	for slot := range slots {
		_ = e.Event(abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Size: 1})
	}
	testenv.OK(b, e.Flush())
	rng := rand.New(rand.NewPCG(1, 2))
	order := make([]uint32, 64*4*sandbox.MaxBatch)
	for i := range order {
		order[i] = rng.Uint32N(slots)
	}
	at := 0
	return func() {
		at = (at + 4*sandbox.MaxBatch) % len(order)
		for _, slot := range order[at : at+4*sandbox.MaxBatch] {
			if err := e.Event(abi.Event{Op: abi.OpTouch, Slot: slot, Parent: abi.None, Size: 1}); err != nil {
				b.Fatal(err) // here: a call for each event takes a tenth of what is measured
			}
		}
	}
}

// An event of a full batch, delivery included.
func BenchmarkSpeedOfEvents(b *testing.B) {
	inC := recency(b)
	for _, slots := range []uint32{4096, 1 << 20} {
		b.Run(fmt.Sprintf("slots=%d", slots), func(b *testing.B) {
			contest(b, 4*sandbox.MaxBatch,
				side{"native", touches(b, natives["lru"], slots)},
				side{"go", touches(b, modules["lru"], slots)},
				side{"c", touches(b, inC, slots)},
			)
		})
	}
}

// recency is the example of the same policy in C.
func recency(b *testing.B) *Module {
	m, err := Open(b.Context(), policytest.Example(b, "recency"), Options{})
	testenv.OK(b, err)
	b.Cleanup(func() { m.Close(context.Background()) })
	return m
}

// What each store of a full root costs: one entry goes and one comes.
func BenchmarkSpeedOfStep(b *testing.B) {
	step := func(m *Module) func() {
		e := newEvict(b, m, 4096)
		for slot := range uint32(4096) {
			_ = e.Event(abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Size: 1})
		}
		dst := make([]uint32, 1)
		return func() {
			for range 256 {
				n, err := e.Victims(abi.Ask{Bytes: abi.SizeUnit, MaxVictims: 1, Tenant: abi.None}, dst)
				if err != nil || n != 1 {
					b.Fatal(n, err)
				}
				_ = e.Event(abi.Event{Op: abi.OpRemove, Slot: dst[0], Parent: abi.None})
				_ = e.Event(abi.Event{Op: abi.OpInsert, Slot: dst[0], Parent: abi.None, Size: 1})
			}
		}
	}
	contest(b, 256, side{"native", step(natives["lru"])}, side{"wasm", step(modules["lru"])})
}
