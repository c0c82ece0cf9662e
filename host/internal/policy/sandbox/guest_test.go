package sandbox

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

const (
	opLoop, opEnd, opBr, opDrop = 0x03, 0x0b, 0x0c, 0x1a
	i32Add, i32Store            = 0x6a, 0x36
)

var i32Type, funcType = byte(0x7f), byte(0x70)

// setupExport is a function without a limit of time.
const setupExport = "setup"

// events is a guest whose kv_events has so many i32 locals, from local 0 on.
func events(pages uint64, locals int, body []byte) guest {
	declared := [][]byte{code(leb(locals), int(i32Type))}
	return guest{pages: pages, funcs: []guestFunc{{name: abi.ExportEvents, locals: declared, code: body}}}
}

// guest is a module whose functions are of type () -> ().
type guest struct {
	tables   [][]byte
	globals  [][]byte
	elements [][]byte
	pages    uint64
	funcs    []guestFunc
}

type guestFunc struct {
	name   string   // exported under it; empty for none
	locals [][]byte // groups: count and type
	code   []byte   // without the last end
}

func leb(n int) []byte { return wasmtest.Uleb(uint64(n)) }

func i32(v int) []byte { return wasmtest.I32(int32(v)) }

func code(parts ...any) (out []byte) {
	for _, p := range parts {
		switch p := p.(type) {
		case int:
			out = append(out, byte(p))
		case []byte:
			out = append(out, p...)
		}
	}
	return out
}

func (g *guest) bytes() []byte {
	a := wasmtest.Assembly{Pages: max(1, g.pages), Sections: map[byte][]byte{}}
	for id, items := range map[byte][][]byte{4: g.tables, 6: g.globals, 9: g.elements} {
		if len(items) > 0 {
			a.Sections[id] = wasmtest.Vector(items...)
		}
	}
	for _, f := range g.funcs {
		a.Funcs = append(a.Funcs, wasmtest.Function{Name: f.name, Sig: ">", Body: f.code, Locals: wasmtest.Vector(f.locals...)})
	}
	return a.Bytes()
}

// compiled compiles the guest for tests that call it by hand.
func (g *guest) compiled(t testing.TB, pages uint32, clock func() time.Duration) *Code {
	t.Helper()
	wasm := g.bytes()
	scan, err := ScanModule(wasm)
	testenv.OK(t, err)
	limits := Fuel{}.Limits(nil)
	limits.CPUTime = time.Hour
	c, err := Compile(t.Context(), &Source{
		Name: "guest", Digest: fmt.Sprintf("%x", sha256.Sum256(wasm)), Bytes: wasm, Scan: scan, Pages: pages, Limits: limits,
		Counters: 1, Log: slog.New(slog.DiscardHandler), CPUClock: clock,
	})
	testenv.OK(t, err)
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// instance starts the guest without kv_init.
func (g *guest) instance(t testing.TB, c *Code) *Instance {
	t.Helper()
	in, err := c.Instantiate(t.Context(), &Settings{Bare: true, MemoryPages: c.pages}, &Usage{})
	testenv.OK(t, err)
	t.Cleanup(in.Close)
	return in
}

// spend calls a function with so much fuel, and returns what it used.
func spend(t testing.TB, in *Instance, name string, fuel uint64) (used uint64, err error) {
	t.Helper()
	f := in.Export(name)
	if !f.Exists() {
		t.Fatalf("no function %s", name)
	}
	before := in.usage.Fuel.Load()
	err = in.Call(&f, 0, 0, Setup, fuel)
	if err != nil && !errors.Is(err, ErrFuel) && !errors.Is(err, ErrTime) {
		return in.usage.Fuel.Load() - before, err
	}
	return in.usage.Fuel.Load() - before, err
}
