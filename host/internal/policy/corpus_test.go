package policy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	metering "github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/kvhost/kvhost/host/kv"
)

// Bad guests: each must end with the right fault and within its fuel, or be refused, and leave all others alone. Package
// wasmtest has many more.

// entries call one export each, in a module of its role.
var entries = []struct {
	export string
	role   abi.Role
	enter  func(m *Module) (Stats, error)
}{
	{abi.ExportInitialize, abi.RoleEvict, enterEvict}, {abi.ExportBuffer, abi.RoleEvict, enterEvict},
	{abi.ExportInit, abi.RoleEvict, enterEvict}, {abi.ExportEvents, abi.RoleEvict, enterEvict}, {abi.ExportStep, abi.RoleEvict, enterEvict},
	{abi.ExportNamespace, abi.RolePlace, enterPlace}, {abi.ExportPlace, abi.RolePlace, enterPlace},
	{abi.ExportAdmit, abi.RoleAdmit, enterAdmit}, {abi.ExportLayout, abi.RoleLayout, enterLayout},
}

func enterEvict(m *Module) (Stats, error) {
	e, err := m.NewEvict(context.Background(), EvictOptions{MaxSlots: 10})
	if err != nil {
		return Stats{Faults: 1}, err
	}
	defer e.Close()
	_ = e.Event(abi.Event{})
	if err = e.Flush(); err == nil {
		_, err = e.Victims(abi.Ask{MaxVictims: 1}, make([]uint32, 1))
	}
	return e.Stats(), err
}

func enterPlace(m *Module) (Stats, error) {
	p, err := m.NewPlace(context.Background(), PlaceOptions{})
	if err != nil {
		return Stats{Faults: 1}, err
	}
	defer p.Close()
	if err = p.Namespace(0, "x"); err == nil {
		_, _, err = p.Path(&abi.PlaceQuery{KeyLen: 8}, nil)
	}
	return p.Stats(), err
}

func enterAdmit(m *Module) (Stats, error) {
	a, err := m.NewAdmit(context.Background(), AdmitOptions{})
	if err != nil {
		return Stats{Faults: 1}, err
	}
	defer a.Close()
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.Stats(), a.ask(make([]abi.Candidate, 3), make([]bool, 3))
}

func enterLayout(m *Module) (Stats, error) {
	l, err := m.NewLayout(context.Background(), LayoutOptions{})
	if err != nil {
		return Stats{Faults: 1}, err
	}
	defer l.Close()
	_, err = askLayout(l, kv.Uniform(4, 2, 2, 4096))
	return l.Stats(), err
}

// askLayout asks the guest only, so that its fault is seen.
func askLayout(l *Layout, g kv.Geometry) (*kv.Plan, error) {
	var planes []abi.Plane
	for _, p := range g.Planes {
		planes = append(planes, abi.Plane{Layer: p.Layer, Part: p.Part, PageBytes: p.PageBytes})
	}
	return l.plan(abi.LayoutHeader{Blocks: g.Blocks, Planes: uint32(len(planes))}, planes, "x", g)
}

// roomy is minimal with buffers of 2 MiB, and answers that leave it to the host.
func roomy(role abi.Role) wasmtest.Assembly {
	a := minimal(role).With(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, wasmtest.I32(21), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a})
	if role == abi.RolePlace {
		a = a.With(abi.ExportPlace, "ii>I", wasmtest.Packed(abi.StatusDefault, 0)).With(abi.ExportNamespace, "ii>i", wasmtest.I32(0))
	}
	a.Pages = 200
	return a
}

// patient leaves it to fuel alone to end a loop, which under the race detector takes its time.
var patient = Options{Fuel: sandbox.Fuel{Time: time.Hour}}

// Each export can trap, loop for ever, or answer with a status below 0: the fault names it.
func TestEachExportCanFail(t *testing.T) {
	for _, e := range entries {
		for kind, body := range map[string][]byte{"trap": unreachable, "loop": wasmtest.Join(wasmtest.Loop(), unreachable), "status": wasmtest.I32(-3)} {
			sig := wasmtest.Signatures[e.export]
			if kind == "status" && (sig == ">" || e.export == abi.ExportBuffer) {
				continue
			}
			if kind == "status" && strings.HasSuffix(sig, "I") {
				body = wasmtest.Packed(abi.StatusInternal, 0)
			}
			t.Run(e.export+"/"+kind, func(t *testing.T) {
				m, err := openBytes(t, roomy(e.role).With(e.export, sig, body).Bytes(), patient)
				testenv.OK(t, err)
				_, err = e.enter(m)
				var f *Fault
				if !errors.As(err, &f) || f.Export != e.export || errors.Is(err, ErrFuel) != (kind == "loop") {
					t.Errorf("a %s in %s: got %v", kind, e.export, err)
				}
			})
		}
	}
}

func TestWrongSignatures(t *testing.T) {
	for _, e := range entries {
		_, err := openBytes(t, roomy(e.role).With(e.export, "F>F", []byte{0x20, 0}).Bytes(), Options{})
		if want := fmt.Sprintf("its %s is (f64) -> f64, want", e.export); !errors.Is(err, ErrBadModule) || !strings.Contains(err.Error(), want) {
			t.Errorf("opening a module with another type of %s: got %v, want %q", e.export, err, want)
		}
	}
}

// A module that names the meter's global, which it does not have yet, would give itself fuel. (The global's export is reserved:
// TestInspect.)
func TestRefuelling(t *testing.T) {
	set := wasmtest.Join(wasmtest.I64(1<<40), []byte{0x24, 0}) // global.set 0
	b := minimal(abi.RoleEvict).With(abi.ExportStep, "ii>I", set, wasmtest.I64(0)).Bytes()
	if _, err := openBytes(t, b, Options{}); !errors.Is(err, ErrBadModule) || !strings.Contains(err.Error(), "global") {
		t.Errorf("opening a module with a global that is not there: want %v, got %v", ErrBadModule, err)
	}
}

// A layout that misses a byte, or has more segments than there may be, is a fault.
func TestFaultyLayout(t *testing.T) {
	const result = 4096 + 3<<21
	var body []byte
	for k, v := range []int32{0, 0, 4, 0, 4095, 0} { // plane, block, blocks, page_off, page_len, gap
		body = wasmtest.Join(body, store32(result+int32(4*k), v))
	}
	for says, code := range map[string][]byte{
		"segments hold 16380 bytes": wasmtest.Join(body, wasmtest.Packed(0, 1)), "at most 65536": wasmtest.Packed(0, 0xffffffff),
	} {
		l, err := open(t, roomy(abi.RoleLayout).With(abi.ExportLayout, "ii>I", code), Options{}).NewLayout(t.Context(), LayoutOptions{})
		testenv.OK(t, err)
		defer l.Close()
		if _, err := askLayout(l, kv.Uniform(4, 1, 1, 4096)); !errors.Is(err, ErrFault) || !strings.Contains(err.Error(), says) {
			t.Errorf("asking for a plan: got %v, want %q", err, says)
		}
	}
}

func TestBeyondLimits(t *testing.T) {
	body := func(n int) []byte {
		return minimal(abi.RoleEvict).With(abi.ExportStep, "ii>I", bytes.Repeat([]byte{1}, n), wasmtest.I64(0)).Bytes()
	}
	if _, err := openBytes(t, body(2<<20), Options{}); !errors.Is(err, metering.ErrLimit) {
		t.Errorf("a function of 2 MiB: %v", err)
	}
}

// A host full of bad guests decides as one without.
func TestBadGuestsLeaveOthersAlone(t *testing.T) {
	want := decisions(t, natives["lru"])
	var stop, bad sync.WaitGroup
	done := make(chan struct{})
	for _, name := range []string{"loop", "store", "fill", "recursion"} {
		m := open(t, stallers[name], Options{})
		bad.Add(1)
		stop.Go(func() {
			first := sync.OnceFunc(bad.Done)
			for {
				_, _ = enterEvict(m)
				first()
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	bad.Wait()
	got := decisions(t, modules["lru"])
	close(done)
	stop.Wait()
	if !bytes.Equal(got, want) {
		t.Error("decisions differ beside bad guests")
	}
}
