package sandbox

import (
	"bytes"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// Modules that are made to exhaust a compiler. All are valid and within the limits of what one function may have.

// heavy is a function (i32) -> () of so many i64 locals, and code without the last end.
func heavy(locals int, code ...[]byte) wasmtest.Function {
	f := wasmtest.Function{Sig: "i>", Body: wasmtest.Join(code...)}
	if locals > 0 {
		f.Locals = wasmtest.Vector(append(leb(locals), 0x7e))
	}
	return f
}

// module has the functions, and for their blocks more types behind theirs.
func module(funcs []wasmtest.Function, types ...[]byte) []byte {
	types = append([][]byte{{0x60, 1, 0x7f, 0}}, types...)
	kinds := append(leb(len(funcs)), make([]byte, len(funcs))...)
	return wasmtest.Assembly{Funcs: funcs, NoMemory: true}.
		Replacing(1, wasmtest.Vector(types...)).Replacing(3, kinds).Bytes()
}

func times(n int, b ...byte) []byte { return bytes.Repeat(b, n) }

const (
	opBlock, opIf     = 0x02, 0x04
	opBrIf, opBrTable = 0x0d, 0x0e
	empty             = 0x40
)

// locals: many functions with many locals, each with a branch, so that they are merged.
func manyLocals(functions, locals int) []byte {
	f := heavy(locals, []byte{0x20, 0, opIf, empty}, []byte{0x42, 1, 0x21}, leb(locals), []byte{opEnd})
	return module(slices.Repeat([]wasmtest.Function{f}, functions))
}

// blockParams: blocks that take and give many values.
func blockParams(blocks, values int) []byte {
	kind := slices.Concat([]byte{0x60}, leb(values), times(values, 0x7e), leb(values), times(values, 0x7e))
	one := slices.Concat([]byte{0x20, 0, opIf}, wasmtest.Sleb(1), []byte{0x05, opEnd})
	return module([]wasmtest.Function{heavy(0, times(values, 0x42, 0), bytes.Repeat(one, blocks), times(values, 0x1a))}, kind)
}

// nested: so many of one construct inside each other.
func nested(depth int, open ...byte) []byte {
	return module([]wasmtest.Function{heavy(0, times(depth, open...), times(depth, opEnd))})
}

// phis: functions with locals that are set in loops, so that each loop merges all of them.
func phis(functions, loops, locals int) []byte {
	var code []byte
	for i := range loops {
		code = slices.Concat(code, []byte{opLoop, empty, 0x42, 1, 0x21}, leb(1+i%locals), []byte{0x20, 0, opBrIf, 0, opEnd})
	}
	return module(slices.Repeat([]wasmtest.Function{heavy(locals, code)}, functions))
}

// labels: jump tables whose labels all carry many values.
func labels(n, values int) []byte {
	kind := slices.Concat([]byte{0x60, 0}, leb(values), times(values, 0x7e))
	table := slices.Concat([]byte{0x20, 0, opBrTable}, leb(n), times(n+1, 0))
	block := slices.Concat([]byte{opBlock}, wasmtest.Sleb(1), times(values, 0x42, 0), table, []byte{opEnd})
	return module([]wasmtest.Function{heavy(0, block, times(values, 0x1a))}, kind)
}

// A memory of exactly 4 GiB would have the size 0 in 32 bits.
func TestMostMemoryFitsASize(t *testing.T) {
	c := &Code{pages: 1 << 16}
	if got := c.memoryLimit(&Settings{MemoryPages: 1 << 16}); got != 1<<32-pageSize {
		t.Errorf("%d bytes", got)
	}
}

func TestFuelLimits(t *testing.T) {
	for _, c := range []struct {
		name    string
		fuel    Fuel
		hint    *abi.FuelHints
		n       int
		allowed uint64
	}{
		{"default", Fuel{}, nil, 10, defaultCallFuel + 10*defaultRecordFuel},
		{"default, capped", Fuel{}, nil, 100_000, maxFuel},
		{"a hint below the default", Fuel{}, &abi.FuelHints{Call: 1, Record: 1}, 1, defaultCallFuel + defaultRecordFuel},
		{"a hint above it", Fuel{}, &abi.FuelHints{Call: 900_000, Record: 20_000}, 10, 1_650_000},
		{"a hint beyond all bounds", Fuel{}, &abi.FuelHints{Call: 1 << 60, Record: 1 << 60}, 1, maxFuel},
		{"the operator wants less", Fuel{Call: 100, Record: 1}, &abi.FuelHints{Call: 900_000}, 5, 105},
		{"the operator allows more", Fuel{Call: 1 << 30}, nil, 0, 1 << 30},
		{"beyond reason", Fuel{Call: 1 << 63, Record: 1 << 63}, nil, 1280, maxOperatorFuel + 1280*maxOperatorFuel},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := c.fuel.Limits(c.hint)
			if got := b.For(c.n); got != c.allowed {
				t.Errorf("the fuel of a call is %d, want %d", got, c.allowed)
			}
		})
	}
}

// A policy with expensive events gets fewer of them per call.
func TestExpensiveEventsComeInSmallBatches(t *testing.T) {
	for _, c := range []struct {
		hint abi.FuelHints
		most int
	}{
		{abi.FuelHints{}, MaxBatch},
		{abi.FuelHints{Call: 1_000_000, Record: 30_000}, 100},
		{abi.FuelHints{Call: 1 << 40, Record: 1 << 40}, 1},
	} {
		b := Fuel{}.Limits(&c.hint)
		if got := b.Batch(); got != c.most {
			t.Errorf("%+v: %d events", c.hint, got)
		}
		if b.For(c.most) > maxFuel {
			t.Errorf("%+v: a batch gets %d", c.hint, b.For(c.most))
		}
	}
}
