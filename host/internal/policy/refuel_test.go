package policy

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

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
