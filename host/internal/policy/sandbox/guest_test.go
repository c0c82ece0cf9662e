package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
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

// guest is a module put together by hand. Its functions have type 0, () -> ().
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

func leb(n int) []byte { return binary.AppendUvarint(nil, uint64(n)) }

func sleb(v int64) (out []byte) {
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if (v == 0 && c&0x40 == 0) || (v == -1 && c&0x40 != 0) {
			return append(out, c)
		}
		out = append(out, c|0x80)
	}
}

func i32(v int) []byte { return append([]byte{0x41}, sleb(int64(int32(v)))...) }

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

func vectorOf(items [][]byte) []byte { return append(leb(len(items)), slices.Concat(items...)...) }

func sectionOf(id byte, content []byte) []byte {
	return append(append([]byte{id}, leb(len(content))...), content...)
}

func (g *guest) bytes() []byte {
	out := []byte("\x00asm\x01\x00\x00\x00")
	out = append(out, sectionOf(1, []byte{1, 0x60, 0, 0})...)
	var kinds, exports, bodies [][]byte
	for n, f := range g.funcs {
		kinds = append(kinds, []byte{0})
		if f.name != "" {
			exports = append(exports, code(leb(len(f.name)), []byte(f.name), 0, leb(n)))
		}
		body := code(vectorOf(f.locals), f.code, 0x0b)
		bodies = append(bodies, append(leb(len(body)), body...))
	}
	add := func(id byte, items [][]byte) {
		if len(items) > 0 {
			out = append(out, sectionOf(id, vectorOf(items))...)
		}
	}
	add(3, kinds)
	add(4, g.tables)
	out = append(out, sectionOf(5, code(1, 0, leb(int(max(1, g.pages)))))...)
	add(6, g.globals)
	add(7, append(exports, []byte{6, 'm', 'e', 'm', 'o', 'r', 'y', 2, 0}))
	add(9, g.elements)
	add(10, bodies)
	return out
}

// compiled compiles the guest for tests that call it by hand.
func (g *guest) compiled(t testing.TB, pages uint32, clock func() time.Duration) *Code {
	t.Helper()
	wasm := g.bytes()
	scan, err := ScanModule(wasm)
	if err != nil {
		t.Fatal(err)
	}
	limits := Fuel{}.Limits(nil)
	limits.CPUTime = time.Hour
	c, err := Compile(t.Context(), &Source{
		Name: "guest", Digest: fmt.Sprintf("%x", sha256.Sum256(wasm)), Bytes: wasm, Scan: scan, Pages: pages, Limits: limits,
		Counters: 1, Log: slog.New(slog.DiscardHandler), CPUClock: clock,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// instance starts the guest without kv_init.
func (g *guest) instance(t testing.TB, c *Code) *Instance {
	t.Helper()
	in, err := c.Instantiate(t.Context(), &Settings{Bare: true, MemoryPages: c.pages}, &Usage{})
	if err != nil {
		t.Fatal(err)
	}
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
	before := in.usage.Fuel()
	err = in.Call(&f, 0, 0, Setup, fuel)
	if err != nil && !errors.Is(err, ErrFuel) && !errors.Is(err, ErrTime) {
		return in.usage.Fuel() - before, err
	}
	return in.usage.Fuel() - before, err
}
