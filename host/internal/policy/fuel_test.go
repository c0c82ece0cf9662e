package policy

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// An instance that runs out dies with a fault that says so and names the guest's functions; what it used is counted.
func TestOutOfFuel(t *testing.T) {
	m, err := Open(t.Context(), "lru", Options{
		Dir: distDir, Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Call: 2000, Record: 1, Time: time.Hour}, SkipSelfTest: true,
	})
	testenv.OK(t, err)
	defer m.Close(t.Context())
	e := newEvict(t, m, 1000)
	before := e.Stats().Fuel
	for slot := range uint32(eventQueue) {
		err = e.Event(abi.Event{Op: abi.OpInsert, Slot: slot, Parent: abi.None, Size: 1})
	}
	var f *Fault
	if !errors.As(err, &f) || !errors.Is(err, ErrFuel) || f.Reason != "used up its fuel of 2256" || f.Export != abi.ExportEvents || !strings.Contains(f.Stack, "lru.") {
		t.Errorf("a call without enough fuel: got %v", err)
	}
	if s := e.Stats(); s.Fuel-before != 2256 || s.Faults != 1 || before == 0 {
		t.Errorf("the stats after it are %+v, want 2256 fuel more than %d and one fault", s, before)
	}
}

// The slices in which the sandbox grants fuel.
const (
	firstSlice = 128_000
	nextSlice  = 64_000
)

// steppingClock advances by a step at each reading.
func steppingClock(step time.Duration) (readings *int, clock func() time.Duration) {
	readings = new(int)
	return readings, func() time.Duration { *readings++; return time.Duration(*readings) * step }
}

func stepOf(t *testing.T, a wasmtest.Assembly, opt Options) (Stats, error) {
	t.Helper()
	e := newEvict(t, open(t, a, opt), 10)
	before := e.Stats().Fuel
	_, err := e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: abi.None}, make([]uint32, 1))
	s := e.Stats()
	s.Fuel -= before
	return s, err
}

// A call that takes too long is ended long before its fuel is, and what it used until then is counted.
func TestTimeEndsACall(t *testing.T) {
	spin := minimal(abi.RoleEvict).With(abi.ExportStep, "ii>I", wasmtest.Loop(), wasmtest.I64(0))
	for _, c := range []struct {
		name   string
		slice  time.Duration // that each takes
		fuel   sandbox.Fuel
		is     error
		slices int // after the first
		says   string
	}{
		{name: "calculates", slice: 20 * time.Microsecond, is: ErrFuel, slices: 38, says: "used up its fuel of 2548000"},
		{name: "waits for memory", slice: 1200 * time.Microsecond, is: ErrTime, slices: 4, says: "more than 3ms of processor time"},
		{name: "the hypervisor was away", slice: time.Second, is: ErrTime, slices: 4, says: "more than 3ms"},
		{name: "the operator is patient", slice: 1200 * time.Microsecond, fuel: sandbox.Fuel{Time: time.Minute}, is: ErrFuel, slices: 38},
		{name: "the operator is not", slice: 20 * time.Microsecond, fuel: sandbox.Fuel{Time: 50 * time.Microsecond}, is: ErrTime, slices: 4},
		{name: "the operator gives more fuel, not time", slice: 20 * time.Microsecond, fuel: sandbox.Fuel{Call: 1 << 30}, is: ErrTime, slices: 152},
	} {
		t.Run(c.name, func(t *testing.T) {
			readings, clock := steppingClock(c.slice)
			s, err := stepOf(t, spin, Options{Fuel: c.fuel, cpuClock: clock})
			var f *Fault
			if !errors.Is(err, c.is) || !errors.As(err, &f) || f.Export != abi.ExportStep || !strings.Contains(err.Error(), c.says) {
				t.Errorf("the call ended with %v, want %v and %q", err, c.is, c.says)
			}
			if *readings != c.slices {
				t.Errorf("%d slices, want %d", *readings, c.slices)
			}
			if most := uint64(firstSlice + c.slices*nextSlice); s.Fuel > most || s.Fuel < most-2*nextSlice {
				t.Errorf("used %d, want about %d", s.Fuel, most)
			}
		})
	}
}

// Work that cannot be looked at while it lasts must be little. A fill is done in slices.
func TestMostAtOnce(t *testing.T) {
	_, clock := steppingClock(0) // it is not time that ends these
	fill := func(n int32) []byte {
		return wasmtest.Join(wasmtest.I32(1<<16), wasmtest.I32(0), wasmtest.I32(n), []byte{0xfc, 11, 0})
	}
	grow := func(n int32) []byte { return wasmtest.Join(wasmtest.I32(n), []byte{0x40, 0, 0x1a}) }
	for _, c := range []struct {
		name string
		code []byte
		is   error
	}{
		{"fill 1 MiB", fill(1 << 20), nil}, {"fill 4 MiB", fill(4 << 20), nil},
		{"grow by 200 pages", grow(200), nil}, {"grow by 500 pages", grow(500), ErrTime},
	} {
		a := minimal(abi.RoleEvict).With(abi.ExportStep, "ii>I", c.code, wasmtest.I64(0))
		a.Pages = 100
		if _, err := stepOf(t, a, Options{cpuClock: clock}); !errors.Is(err, c.is) {
			t.Errorf("%s: the call ended with %v, want %v", c.name, err, c.is)
		}
	}
}

// Nobody waits for the setup of an instance, nor for a layout: they have fuel, but no time limit.
func TestSetupIsNotTimed(t *testing.T) {
	readings, clock := steppingClock(time.Second)
	m, err := Open(t.Context(), "lru", Options{
		Dir: distDir, Cache: policytest.Cache(t), cpuClock: clock, SkipSelfTest: true,
	})
	testenv.OK(t, err)
	defer m.Close(t.Context())
	for range 3 {
		newEvict(t, m, 100_000).Close()
	}
	if *readings != 0 {
		t.Errorf("%d readings", *readings)
	}
}

// Every guest that is made to take its time ends, and by what it should.
func TestStallers(t *testing.T) {
	for name, a := range stallers {
		if _, err := stepOf(t, a, Options{}); !errors.Is(err, ErrFuel) && !errors.Is(err, ErrTime) {
			t.Errorf("%s: the call ended with %v, want its fuel or time to end", name, err)
		}
	}
}

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
