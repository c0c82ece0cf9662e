package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// grower takes all memory that it gets, page by page, in kv_init. It stays legal unless it traps at the end.
func grower(trap bool) wasmtest.Assembly {
	grow := wasmtest.Join([]byte{0x03, 0x40}, wasmtest.I32(1), []byte{0x40, 0}, wasmtest.I32(-1), []byte{0x47, 0x0d, 0, 0x0b}) // until memory.grow says -1
	end := wasmtest.I32(0)
	if trap {
		end = unreachable
	}
	a := minimal(abi.RoleEvict).With(abi.ExportInit, "i>i", grow, end)
	a.Manifest = `{"name":"grower","version":"1","abi":1,"roles":["evict"],"memory_pages":65536}`
	return a
}

func TestOperatorLimitsMemory(t *testing.T) {
	for _, c := range []struct {
		name  string
		opt   Options
		slots uint32
		want  uint64
	}{
		{"default", Options{}, 0, 64 << 20},
		{"default with slots", Options{}, 1 << 20, 192 << 20},
		{"the operator's", Options{MemoryPages: 100}, 1 << 20, 100 << 16},
		{"more than the default", Options{MemoryPages: 5000}, 0, 5000 << 16},
	} {
		p, err := open(t, grower(false), c.opt).Probe(t.Context(), ProbeOptions{Role: abi.RoleEvict, MaxSlots: c.slots})
		testenv.OK(t, err)
		if got := p.MemoryBytes(); got != c.want {
			t.Errorf("%s: %d bytes, want %d", c.name, got, c.want)
		}
		p.Close()
	}
}

// All instances together stay within one budget, whatever their modules, and give it back.
func TestMemoryBudget(t *testing.T) {
	budget := sandbox.NewMemoryBudget(80 << 20)
	opt := Options{Memory: budget}
	options := ProbeOptions{Role: abi.RoleEvict}
	first, err := open(t, grower(false), opt).Probe(t.Context(), options)
	testenv.OK(t, err)
	second, err := open(t, grower(false), opt).Probe(t.Context(), options)
	testenv.OK(t, err)
	if budget.Used() != 80<<20 || first.MemoryBytes()+second.MemoryBytes() != 80<<20 {
		t.Errorf("%d used, by %d and %d", budget.Used(), first.MemoryBytes(), second.MemoryBytes())
	}
	if _, err := open(t, minimal(abi.RoleEvict), opt).NewEvict(t.Context(), EvictOptions{MaxSlots: 1}); !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), "policy_memory") {
		t.Errorf("without any memory left: %v", err)
	}
	second.Close()
	_, err = open(t, grower(true), opt).NewEvict(t.Context(), EvictOptions{MaxSlots: 1})
	if !errors.Is(err, ErrFault) || !strings.Contains(err.Error(), "policy_memory allows 80 for all policies") {
		t.Errorf("a guest that traps for want of memory: %v", err)
	}
	first.Close()
	if used := budget.Used(); used != 0 {
		t.Errorf("%d bytes used by nobody", used)
	}
}

// What each role's instances have adds up to what all have, also where an instance takes over from another.
func TestMemoryOfEachRole(t *testing.T) {
	budget := sandbox.NewMemoryBudget(80 << 20)
	opt := Options{Memory: budget}
	state := State{Format: "k/1", Data: word(1)}
	evict, err := open(t, keeper(abi.RoleEvict, "k/1"), opt).NewEvict(t.Context(), EvictOptions{MaxSlots: 10, State: state})
	if err != nil || !evict.Loaded() {
		t.Fatal(err)
	}
	admit, err := open(t, keeper(abi.RoleAdmit, "k/1"), opt).NewAdmit(t.Context(), AdmitOptions{State: state})
	testenv.OK(t, err)
	m := open(t, mortal(), opt)
	place, err := m.NewPlace(t.Context(), PlaceOptions{})
	testenv.OK(t, err)
	of := func(s Stats) uint64 { return s.Memory }
	e, a, p := of(evict.Stats()), of(admit.Stats()), of(place.Stats())
	if e == 0 || a == 0 || p == 0 || e+a+p != budget.Used() {
		t.Errorf("evict %d, admit %d, place %d, all %d", e, a, p, budget.Used())
	}
	if _, _, err := place.Path(&abi.PlaceQuery{Namespace: 13, KeyLen: 16}, nil); !errors.Is(err, ErrFault) || of(place.Stats()) != 0 {
		t.Errorf("%d bytes after %v", of(place.Stats()), err)
	}
	evict.Close()
	admit.Close()
	place.Close()
	if e, a := of(evict.Stats()), of(admit.Stats()); e+a+budget.Used() != 0 {
		t.Errorf("at the end: evict %d, admit %d, all %d", e, a, budget.Used())
	}
}
