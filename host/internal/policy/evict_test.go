package policy

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

// A module and the same source linked natively must decide alike, to the byte, whatever the events.
func TestEvictWasmDecidesLikeNative(t *testing.T) {
	for _, name := range []string{"lru", "fifo"} {
		for seed := range uint64(4) {
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) {
				const slots = 2000
				wasm, native := newEvict(t, modules[name], slots), newEvict(t, natives[name], slots)
				s := newStream(seed, slots)
				var a, b [16]uint32
				for step := range 1000 {
					for range 1 + s.rng.IntN(300) {
						ev := s.next()
						if err := wasm.Event(ev); err != nil {
							t.Fatal(err)
						}
						if err := native.Event(ev); err != nil {
							t.Fatal(err)
						}
					}
					ask := s.ask()
					n, err := wasm.Victims(ask, a[:])
					if err != nil {
						t.Fatal(err)
					}
					k, err := native.Victims(ask, b[:])
					if err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(a[:n], b[:k]) {
						t.Fatalf("step %d, %+v: wasm %v, native %v", step, ask, a[:n], b[:k])
					}
					for i, v := range a[:n] {
						if s.at[v] < 0 || s.pins[v] {
							t.Fatalf("step %d: victim %d (resident at %d, pinned %v)", step, v, s.at[v], s.pins[v])
						}
						if i%2 == 0 { // a victim need not go
							ev := s.remove(v)
							_ = wasm.Event(ev)
							_ = native.Event(ev)
						}
					}
				}
				if w, n := wasm.Stats(), native.Stats(); w.Records != n.Records || w.Calls < n.Calls || w.Faults != 0 {
					t.Errorf("stats: wasm %+v, native %+v", w, n)
				}
			})
		}
	}
}

func TestEvictAllocatesNothing(t *testing.T) {
	for _, m := range []*Module{modules["lru"], natives["lru"]} {
		e := newEvict(t, m, 4096)
		for slot := range uint32(4096) {
			if err := e.Event(abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Size: 1}); err != nil {
				t.Fatal(err)
			}
		}
		dst := make([]uint32, 4)
		slot := uint32(0)
		n := testing.AllocsPerRun(200, func() {
			for range 300 {
				slot = (slot + 997) % 4096
				if err := e.Event(abi.Event{Op: abi.OpTouch, Slot: slot}); err != nil {
					t.Fatal(err)
				}
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

// One sub-benchmark per side, so that a run shows the ratio.
func BenchmarkEvents256(b *testing.B) {
	for _, size := range []uint32{4096, 1 << 20} {
		for _, name := range []string{"native", "wasm"} {
			b.Run(fmt.Sprintf("slots=%d/%s", size, name), func(b *testing.B) {
				m := natives["lru"]
				if name == "wasm" {
					m = modules["lru"]
				}
				e := newEvict(b, m, size)
				for slot := range size {
					_ = e.Event(abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Size: 1})
				}
				_ = e.Flush()
				slot := uint32(1)
				b.ReportAllocs()
				for b.Loop() { // one event per iteration; a crossing per 256
					slot = slot*1664525 + 1013904223
					if err := e.Event(abi.Event{Op: abi.OpTouch, Slot: slot & (size - 1), Parent: abi.None, Size: 1}); err != nil {
						b.Fatal(err)
					}
				}
				s := e.Stats()
				b.ReportMetric(float64(s.Time.Nanoseconds())/float64(max(1, s.Records)), "guest-ns/event")
			})
		}
	}
}

func BenchmarkVictimPerInsert(b *testing.B) {
	for _, name := range []string{"native", "wasm"} {
		b.Run(name, func(b *testing.B) {
			m := natives["lru"]
			if name == "wasm" {
				m = modules["lru"]
			}
			e := newEvict(b, m, 4096)
			for slot := range uint32(4096) {
				_ = e.Event(abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Size: 1})
			}
			dst := make([]uint32, 1)
			b.ReportAllocs()
			for b.Loop() {
				n, err := e.Victims(abi.Ask{Bytes: abi.SizeUnit, MaxVictims: 1, Tenant: abi.None}, dst)
				if err != nil || n != 1 {
					b.Fatal(n, err)
				}
				_ = e.Event(abi.Event{Op: abi.OpRemove, Slot: dst[0], Parent: abi.None})
				_ = e.Event(abi.Event{Op: abi.OpInsert, Slot: dst[0], Parent: abi.None, Size: 1})
			}
		})
	}
}
