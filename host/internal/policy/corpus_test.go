package policy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	metering "github.com/kvhost/kvhost/host/internal/policy/meter"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/kv"
)

// Bad guests: each must end with the right fault and within its fuel, or be refused, and leave everybody else alone.
// TestRefusedModules, TestFaultyEvict and TestFaultyPlace hold those that lie; here are those that do not stop, and the
// rest.

var drop = []byte{0x1a}

func loopOf(parts ...[]byte) []byte {
	return bodyOf([]byte{0x03, 0x40}, bodyOf(parts...), []byte{0x0c, 0, 0x0b})
}

func wasiManifest(role abi.Role) string {
	return fmt.Sprintf(`{"name":"bad","version":"1","abi":1,"roles":[%q],"grants":["wasi-stub"]}`, role)
}

// runaways never return. self is the function they stand in; log and write are imports 0 and 1.
var runaways = []struct {
	name string
	body func(self uint64) []byte
}{
	{"endless loop", func(uint64) []byte { return loopOf() }},
	{"loop that works", func(uint64) []byte { return loopOf(store32(64, 1)) }},
	{"straight line in a loop", func(uint64) []byte { return loopOf(bytes.Repeat(bodyOf(i32(1), drop), 250_000)) }},
	{"exponential recursion", func(self uint64) []byte {
		again := bodyOf(i32(0), i32(0), call(self), drop)
		return bodyOf(again, again)
	}},
	{"deep recursion", func(self uint64) []byte { return bodyOf(i32(0), i32(0), call(self), drop) }},
	{"growing by nothing", func(uint64) []byte { return loopOf(i32(0), []byte{0x40, 0}, drop) }},
	{"growing for ever", func(uint64) []byte { return loopOf(i32(1), []byte{0x40, 0}, drop) }},
	{"filling memory", func(uint64) []byte { return loopOf(i32(0), i32(7), i32(2<<16), []byte{0xfc, 11, 0}) }},
	{"filling nothing", func(uint64) []byte { return loopOf(i32(0), i32(7), i32(0), []byte{0xfc, 11, 0}) }},
	{"endless log", func(uint64) []byte { return loopOf(i32(3), i32(64), i32(1024), call(0)) }},
	{"endless log, unrolled", func(uint64) []byte {
		return bytes.Repeat(bodyOf(i32(3), i32(64), i32(1024), call(0)), 50_000)
	}},
	{"endless output", func(uint64) []byte { // 64 times all of memory with each call
		var list []byte
		for n := range int32(64) {
			list = bodyOf(list, store32(1024+8*n, 0), store32(1028+8*n, 2<<16))
		}
		return bodyOf(list, loopOf(i32(2), i32(1024), i32(64), i32(64), call(1), drop))
	}},
	{"endless random bytes", func(uint64) []byte { return loopOf(i32(0), i32(2<<16), call(2), drop) }},
	{"two loops that dispatch to each other", func(uint64) []byte {
		return []byte{0x03, 0x40, 0x02, 0x40, 0x02, 0x40, 0x20, 0, 0x0e, 1, 0, 1, 0x0b, 0x0c, 1, 0x0b, 0x0c, 0, 0x0b}
	}},
}

func runaway(role abi.Role) assembly {
	a := minimal(role).importing(abi.ImportModule, abi.ImportLog, "iii>").importing(abi.ImportWASI, "fd_write", "iiii>i").
		importing(abi.ImportWASI, "random_get", "ii>i")
	a.manifest = wasiManifest(role)
	return a
}

func logTo(l *lines) *slog.Logger { return slog.New(l) }

// lines counts what is logged.
type lines struct {
	mu sync.Mutex
	n  int
}

func (l *lines) Enabled(context.Context, slog.Level) bool { return true }
func (l *lines) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *lines) WithGroup(string) slog.Handler            { return l }
func (l *lines) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.Message != "compiling policy" { // the host's own
		l.n++
	}
	return nil
}

// logBurst is how many lines per second the sandbox logs for a module.
const logBurst = 64

func TestRunaways(t *testing.T) {
	limits := sandbox.Fuel{}.Limits(nil)
	step := abi.ExportStep
	for _, c := range runaways {
		t.Run(c.name, func(t *testing.T) {
			a := runaway(abi.RoleEvict)
			self := uint64(len(a.imports) + len(a.funcs) - 1)
			if a.funcs[len(a.funcs)-1].name != step {
				t.Fatal("kv_step is not the last function")
			}
			var said lines
			m := open(t, a.with(step, "ii>I", c.body(self), i64(0)), Options{Log: logTo(&said)})
			e := newEvict(t, m, 100)
			before := e.Stats().Fuel
			start := time.Now()
			_, err := e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: abi.None}, make([]uint32, 1))
			t.Logf("%v: %.200s", time.Since(start), fmt.Sprint(err))
			if !errors.Is(err, ErrFuel) && !errors.Is(err, ErrTime) {
				t.Errorf("got %v", err)
			}
			if used := e.Stats().Fuel - before; used > limits.Max {
				t.Errorf("used %d", used)
			}
			if said.n > 2*(logBurst+1) { // the second may turn meanwhile
				t.Errorf("%d lines were logged", said.n)
			}
			if pages := e.in.MemorySize() >> 16; pages > sandbox.DefaultPages {
				t.Errorf("%d pages", pages)
			}
		})
	}
}

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
func roomy(role abi.Role) assembly {
	a := minimal(role).with(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, i32(21), []byte{0x74}, i32(4096), []byte{0x6a})
	if role == abi.RolePlace {
		a = a.with(abi.ExportPlace, "ii>I", packed(abi.StatusDefault, 0)).with(abi.ExportNamespace, "ii>i", i32(0))
	}
	a.pages = 200
	return a
}

// Each export can trap, loop for ever, or answer with a status below 0: the fault names it.
func TestEachExportCanFail(t *testing.T) {
	for _, e := range entries {
		for kind, body := range map[string][]byte{"trap": unreachable, "loop": bodyOf(loopOf(), unreachable), "status": i32(-3)} {
			sig := sandbox.ExportType(e.export)
			if kind == "status" && (sig == ">" || e.export == abi.ExportBuffer) {
				continue
			}
			if kind == "status" && strings.HasSuffix(sig, "I") {
				body = packed(abi.StatusInternal, 0)
			}
			t.Run(e.export+"/"+kind, func(t *testing.T) {
				m, err := openBytes(t, roomy(e.role).with(e.export, sig, body).bytes(), Options{})
				if err != nil {
					t.Fatal(err)
				}
				_, err = e.enter(m)
				var f *Fault
				if !errors.As(err, &f) || f.Export != e.export || errors.Is(err, ErrFuel) != (kind == "loop") {
					t.Errorf("got %v", err)
				}
			})
		}
	}
}

func TestWrongSignatures(t *testing.T) {
	for _, e := range entries {
		_, err := openBytes(t, roomy(e.role).with(e.export, "F>F", []byte{0x20, 0}).bytes(), Options{})
		if want := fmt.Sprintf("its %s is (f64) -> f64, want", e.export); !errors.Is(err, ErrBadModule) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// Growing to the limit is allowed, and no more.
func TestMemoryLimit(t *testing.T) {
	untilRefused := bodyOf([]byte{0x03, 0x40}, i32(1), []byte{0x40, 0}, i32(-1), []byte{0x47, 0x0d, 0, 0x0b}, i64(0)) // br_if grow != -1
	m := open(t, minimal(abi.RoleEvict).with(abi.ExportStep, "ii>I", untilRefused), Options{MemoryPages: 50})
	e := newEvict(t, m, 10)
	if _, err := e.Victims(abi.Ask{MaxVictims: 1}, make([]uint32, 1)); err != nil {
		t.Fatal(err)
	}
	if pages := e.in.MemorySize() >> 16; pages != 50 {
		t.Errorf("%d pages", pages)
	}
}

// What would give a module fuel of its own making is refused, whichever way it is tried.
func TestRefuelling(t *testing.T) {
	evict := minimal(abi.RoleEvict)
	set := bodyOf(i64(1<<40), []byte{0x24, 0}) // global.set 0: the meter's, in a module that has none
	reserved := evict.with(metering.Global, ">")
	for name, c := range map[string]struct {
		mod  []byte
		says string
	}{
		"global that does not exist yet": {evict.with(abi.ExportStep, "ii>I", set, i64(0)).bytes(), "global"},
		"reserved name":                  {reserved.bytes(), metering.Global},
	} {
		if _, err := openBytes(t, c.mod, Options{}); !errors.Is(err, ErrBadModule) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestBeyondLimits(t *testing.T) {
	body := func(n int) []byte {
		return minimal(abi.RoleEvict).with(abi.ExportStep, "ii>I", bytes.Repeat([]byte{1}, n), i64(0)).bytes()
	}
	if _, err := openBytes(t, body(2<<20), Options{}); !errors.Is(err, metering.ErrLimit) {
		t.Errorf("a function of 2 MiB: %v", err)
	}
	huge := filepath.Join(t.TempDir(), "huge.wasm")
	f, err := os.Create(huge)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(minimal(abi.RoleEvict).bytes())
	if err = errors.Join(err, f.Truncate(100<<20), f.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), huge, Options{}); !errors.Is(err, ErrBadModule) || !strings.Contains(err.Error(), "more than 16777216 bytes") {
		t.Errorf("a module of 100 MB: %v", err)
	}
}

// A host full of bad guests decides as one without.
func TestBadGuestsLeaveOthersAlone(t *testing.T) {
	want := decisions(t, natives["lru"])
	var stop, bad sync.WaitGroup
	done := make(chan struct{})
	for _, c := range runaways[:4] {
		m := open(t, runaway(abi.RoleEvict).with(abi.ExportStep, "ii>I", c.body(7), i64(0)), Options{})
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
