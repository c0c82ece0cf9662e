package policy

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/layermajor"
	"github.com/kvhost/kvhost/plugins/lru"
)

// The first-party policies: each as a module, and the same source linked natively.
var (
	modules = map[string]*Module{}
	natives = map[string]*Module{
		"lru":        NativeModule("lru", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) { return lru.New(i) }),
		"fifo":       NativeModule("fifo", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) { return fifo.New(i) }),
		"fanout":     NativeModule("fanout", []abi.Role{abi.RolePlace}, func(i guest.Info) (any, error) { return fanout.New(i) }),
		"layermajor": NativeModule("layermajor", []abi.Role{abi.RoleLayout}, func(i guest.Info) (any, error) { return layermajor.New(i) }),
	}
	distDir string
)

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func runTests(m *testing.M) (int, error) {
	var names []string
	for name := range natives {
		names = append(names, name)
	}
	dir, err := policytest.Build(names...)
	if err != nil {
		return 1, err
	}
	distDir = dir
	ctx := context.Background()
	cache, err := policytest.OpenCache()
	if err != nil {
		return 1, err
	}
	defer cache.Close(ctx)
	for _, name := range names {
		if modules[name], err = Open(ctx, name, Options{Dir: dir, Cache: cache}); err != nil {
			return 1, err
		}
		defer modules[name].Close(ctx)
	}
	return m.Run(), nil
}

// stream is a random but legal stream of events over a slot space: what is resident is tracked here.
type stream struct {
	rng      *rand.Rand
	resident []uint32
	at       []int // of each slot in resident, or -1
	pins     []bool
	free     []uint32
	time     uint64
	tenants  uint32
}

func newStream(seed uint64, slots uint32) *stream {
	s := &stream{rng: rand.New(rand.NewPCG(seed, 1)), tenants: 3}
	for i := range slots {
		s.at = append(s.at, -1)
		s.free = append(s.free, slots-1-i)
	}
	s.pins = make([]bool, slots)
	return s
}

func (s *stream) next() abi.Event {
	s.time += 1000
	ev := abi.Event{Parent: abi.None, Time: s.time, Request: uint32(s.time / 64000)}
	roll := s.rng.IntN(100)
	if len(s.resident) == 0 || (roll < 25 && len(s.free) > 0) {
		ev.Op, ev.Slot = abi.OpInsert, s.free[len(s.free)-1]
		if roll == 0 {
			ev.Op = abi.OpResident
		}
		ev.Key, ev.Size, ev.Tenant = s.rng.Uint64(), 1+s.rng.Uint32N(64), s.rng.Uint32N(s.tenants)
		s.free = s.free[:len(s.free)-1]
		s.at[ev.Slot] = len(s.resident)
		s.resident = append(s.resident, ev.Slot)
		return ev
	}
	ev.Slot = s.resident[s.rng.IntN(len(s.resident))]
	switch {
	case roll < 80:
		ev.Op = abi.OpTouch
	case roll < 86:
		ev.Op = abi.OpPin
		s.pins[ev.Slot] = true
	case roll < 92:
		ev.Op = abi.OpUnpin
		s.pins[ev.Slot] = false
	case roll < 94:
		ev.Op = abi.OpLink
	case roll < 95:
		ev.Op, ev.Slot = abi.OpRequestEnd, abi.None
	default:
		return s.remove(ev.Slot)
	}
	return ev
}

func (s *stream) remove(slot uint32) abi.Event {
	i, last := s.at[slot], s.resident[len(s.resident)-1]
	s.resident[i], s.at[last] = last, i
	s.resident = s.resident[:len(s.resident)-1]
	s.at[slot], s.pins[slot] = -1, false
	s.free = append(s.free, slot)
	return abi.Event{Op: abi.OpRemove, Slot: slot, Parent: abi.None, Time: s.time}
}

func (s *stream) ask() abi.Ask {
	a := abi.Ask{Bytes: uint64(1+s.rng.Uint32N(200)) * abi.SizeUnit, MaxVictims: 1 + s.rng.Uint32N(16), Tenant: abi.None}
	if s.rng.IntN(3) == 0 {
		a.Tenant = s.rng.Uint32N(s.tenants + 1)
	}
	return a
}

func newEvict(t testing.TB, m *Module, slots uint32) *Evict {
	t.Helper()
	e, err := m.NewEvict(t.Context(), EvictOptions{MaxSlots: slots, Capacity: 1 << 30, Seed: 7})
	testenv.OK(t, err)
	t.Cleanup(func() { e.Close() })
	return e
}
