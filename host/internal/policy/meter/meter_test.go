package meter

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

func instantiate(t testing.TB, wasm []byte) api.Module {
	t.Helper()
	ctx := context.Background()
	rt := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig())
	t.Cleanup(func() { rt.Close(ctx) })
	m, err := rt.InstantiateWithConfig(ctx, wasm, wazero.NewModuleConfig().WithName("").WithStartFunctions())
	if err != nil {
		t.Fatalf("instantiate: %v", err)
	}
	return m
}

func inject(t testing.TB, wasm []byte) []byte {
	t.Helper()
	out, err := Inject(wasm)
	if err != nil {
		t.Fatalf("inject: %v", err)
	}
	return out
}

func fuel(m api.Module) api.MutableGlobal { return m.ExportedGlobal(Global).(api.MutableGlobal) }

// checkProgram: plain and metered modules compute the same, and the fuel spent is at least what the instructions that
// ran cost.
func checkProgram(t *testing.T, seed uint64, arg uint32) {
	r := rand.New(rand.NewPCG(seed, 7))
	program := generate(r, 5, 0, 0)
	code := emitAll(nil, program)
	for i := byte(0); i < locals; i++ { // the result mixes all locals
		code = append(code, opLocalGet, i)
		if i > 0 {
			code = append(code, 0x73)
		}
	}
	wasm := single(body(locals-1+3, code...))
	var m machine
	m.local[0] = arg
	runAll(&m, program)
	want := m.local[0] ^ m.local[1] ^ m.local[2] ^ m.local[3]

	ctx := context.Background()
	plain := instantiate(t, wasm)
	got, err := plain.ExportedFunction("f").Call(ctx, uint64(arg))
	if err != nil || uint32(got[0]) != want {
		t.Fatalf("seed %d: plain gives %v %v, the program %d", seed, got, err, want)
	}
	metered := instantiate(t, inject(t, wasm))
	fuel(metered).Set(math.MaxInt64)
	got, err = metered.ExportedFunction("f").Call(ctx, uint64(arg))
	if err != nil || uint32(got[0]) != want {
		t.Fatalf("seed %d: metered gives %v %v, the program %d", seed, got, err, want)
	}
	spent := uint64(math.MaxInt64) - fuel(metered).Get()
	if spent < m.steps {
		t.Fatalf("seed %d: %d instructions ran on %d fuel", seed, m.steps, spent)
	}
	// Exactly what it takes is enough; one unit less is too little.
	for _, c := range []struct {
		fuel uint64
		ok   bool
	}{{spent, true}, {spent - 1, false}} {
		fresh := instantiate(t, inject(t, wasm))
		fuel(fresh).Set(c.fuel)
		if _, err := fresh.ExportedFunction("f").Call(ctx, uint64(arg)); c.ok != (err == nil && int64(fuel(fresh).Get()) >= 0) {
			t.Fatalf("seed %d: %d fuel for a run of %d: %v", seed, c.fuel, spent, err)
		}
	}
}

func TestRandomPrograms(t *testing.T) {
	for seed := range uint64(150) {
		checkProgram(t, seed, uint32(seed*2654435761))
	}
}

func FuzzPrograms(f *testing.F) {
	f.Add(uint64(1), uint32(0))
	f.Fuzz(func(t *testing.T, seed uint64, arg uint32) { checkProgram(t, seed, arg) })
}

// FuzzInject: no input panics or hangs, and what is accepted from a module that compiles also compiles.
func FuzzInject(f *testing.F) {
	f.Add(single(body(0, opLocalGet, 0)))
	f.Add(single(body(2, opLoop, blockEmpty, 0x0c, 0, opEnd, opLocalGet, 0)))
	ctx := context.Background()
	f.Fuzz(func(t *testing.T, wasm []byte) {
		out, err := Inject(wasm)
		if err != nil {
			return
		}
		rt := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfigInterpreter().WithMemoryLimitPages(64))
		defer rt.Close(ctx)
		if _, err := rt.CompileModule(ctx, wasm); err != nil {
			return
		}
		if _, err := rt.CompileModule(ctx, out); err != nil {
			t.Fatalf("the original compiles, the metered form does not: %v", err)
		}
	})
}

func TestBulkOperationsPayByLength(t *testing.T) {
	fill := single(body(0, opI32Const, 0, opI32Const, 0, opLocalGet, 0, opPrefixMisc, miscMemoryFill, 0, opLocalGet, 0))
	grow := single(body(0, opLocalGet, 0, opMemoryGrow, 0))
	copied := single(body(0, opI32Const, 0, opI32Const, 0, opLocalGet, 0, opPrefixMisc, miscMemoryCopy, 0, 0, opLocalGet, 0))
	table := func(code ...byte) []byte { return tabled([]byte{1, 100, 100}, body(0, append(code, opLocalGet, 0)...)) }
	for _, c := range []struct {
		name string
		wasm []byte
		arg  uint64
		more uint64
	}{
		{"fill", fill, 65536, 8192},
		{"grow", grow, 2, 2048},
		{"copy", copied, 65536, 8192},
		{"init", table(opI32Const, 0, opI32Const, 0, opLocalGet, 0, opPrefixMisc, miscMemoryInit, 0, 0), 128, 16},
		{"table.grow", tabled([]byte{0, 0}, body(0, 0xd0, valFuncref, opLocalGet, 0, opPrefixMisc, miscTableGrow, 0)), 800, 800},
		{"table.fill", table(opI32Const, 0, 0xd0, valFuncref, opLocalGet, 0, opPrefixMisc, miscTableFill, 0), 80, 80},
		{"table.copy", table(opI32Const, 0, opI32Const, 0, opLocalGet, 0, opPrefixMisc, miscTableCopy, 0, 0), 80, 80},
		{"table.init", table(opI32Const, 0, opI32Const, 0, opLocalGet, 0, opPrefixMisc, miscTableInit, 0, 0), 16, 16},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := instantiate(t, inject(t, c.wasm))
			cost := func(arg uint64) uint64 {
				fuel(m).Set(1 << 40)
				if _, err := m.ExportedFunction("f").Call(context.Background(), arg); err != nil {
					t.Fatal(err)
				}
				return 1<<40 - fuel(m).Get()
			}
			if a, b := cost(0), cost(c.arg); b-a != c.more {
				t.Errorf("%d units cost %d more than none, want %d", c.arg, b-a, c.more)
			}
		})
	}
}

// A table that declares no maximum, or one above the limit, gets the limit: its elements are the host's memory.
func TestTablesStopAtTheirLimit(t *testing.T) {
	grow := body(0, 0xd0, valFuncref, opLocalGet, 0, opPrefixMisc, miscTableGrow, 0)
	for _, c := range []struct {
		name  string
		table []byte
		by    uint64
		want  int32
	}{
		{"to the limit", []byte{0, 10}, 1<<20 - 10, 10},
		{"beyond the limit", []byte{0, 10}, 1<<20 - 9, -1},
		{"to its own maximum", []byte{1, 10, 20}, 10, 10},
		{"beyond its own maximum", []byte{1, 10, 20}, 11, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := instantiate(t, inject(t, tabled(c.table, grow)))
			fuel(m).Set(1 << 40)
			got, err := m.ExportedFunction("f").Call(context.Background(), c.by)
			if err != nil || int32(got[0]) != c.want {
				t.Fatalf("table.grow answered %v, %v, want %d", got, err, c.want)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	ok := body(0, opLocalGet, 0)
	for _, c := range []struct {
		name string
		wasm []byte
		want error
		says string
	}{
		{"empty", nil, ErrMalformed, "not a WebAssembly module"},
		{"not wasm", []byte("hello, I am not wasm"), ErrMalformed, "not a WebAssembly module"},
		{"cut short", single(ok)[:30], ErrMalformed, ""},
		{"start section", parts(ok).Replacing(secStart, []byte{0}).Bytes(), ErrStart, "_initialize"},
		{"reserved export", wasmtest.Join([]byte(Header), wasmtest.Section(secExport, wasmtest.Vector(wasmtest.Join(wasmtest.Text(Global), []byte{0, 0})))), ErrReserved, Global},
		{"reserved export of a function", wasmtest.Join([]byte(Header), wasmtest.Section(secExport, wasmtest.Vector(wasmtest.Join(wasmtest.Text(Refuel), []byte{0, 0})))), ErrReserved, Refuel},
		{"atomics", single(body(0, 0xfe, 0x03, 0)), ErrOpcode, "0xfe"},
		{"tail call", single(body(0, 0x12, 0)), ErrOpcode, "0x12"},
		{"relaxed SIMD", single(body(0, opPrefixSIMD, 0x80, 2)), ErrOpcode, "relaxed"},
		{"misc beyond table.fill", single(body(0, opPrefixMisc, 18)), ErrOpcode, "0xfc 18"},
		{"unknown section", wasmtest.Join([]byte(Header), wasmtest.Section(13, nil)), ErrOpcode, "section 13"},
		{"sections out of order", wasmtest.Join([]byte(Header), wasmtest.Section(secFunction, wasmtest.Vector()), wasmtest.Section(secType, wasmtest.Vector())), ErrMalformed, "order"},
		{"shared memory", wasmtest.Join([]byte(Header), wasmtest.Section(secMemory, wasmtest.Vector([]byte{3, 1, 1}))), ErrMalformed, "shared"},
		{"many locals", single(body(20_000, opLocalGet, 0)), ErrLimit, "locals"},
		{"huge memory", wasmtest.Join([]byte(Header), wasmtest.Section(secMemory, wasmtest.Vector(append([]byte{0}, appendU32(nil, 60_000)...)))), ErrLimit, "memory pages"},
		{"huge table", wasmtest.Join([]byte(Header), wasmtest.Section(secTable, wasmtest.Vector(append([]byte{0x70, 0}, appendU32(nil, 1<<30)...)))), ErrLimit, "table elements"},
		{"table with an initialiser", wasmtest.Join([]byte(Header), wasmtest.Section(secTable, wasmtest.Vector([]byte{0x40, 0, 0x70, 0, 1}))), ErrMalformed, "0x40"},
		{"64-bit table", wasmtest.Join([]byte(Header), wasmtest.Section(secTable, wasmtest.Vector([]byte{0x70, 4, 1}))), ErrMalformed, "0x04"},
		{"huge body", single(body(0, make([]byte, 2<<20)...)), ErrLimit, "body bytes"},
		{"huge module", append(single(ok), make([]byte, 17<<20)...), ErrLimit, "module bytes"},
		{"a body too many", wasmtest.Join([]byte(Header), wasmtest.Section(secCode, wasmtest.Vector(ok))), ErrMalformed, "bodies"},
		{"end missing", single(sized([]byte{0, opLocalGet, 0})), ErrMalformed, "ends early"},
		{"bytes after end", single(sized([]byte{0, opLocalGet, 0, opEnd, 1, 1})), ErrMalformed, "after a function's end"},
		{"a count that lies", single(sized(wasmtest.Join([]byte{0, 0x0e}, appendU32(nil, 0xffffffff)))), ErrMalformed, "vector"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Inject(c.wasm)
			if !errors.Is(err, c.want) || !strings.Contains(fmt.Sprint(err), c.says) {
				t.Errorf("got %v, want %v saying %q", err, c.want, c.says)
			}
		})
	}
}

// A module that names the global before it exists is not valid by itself; the metered form of it would be. Whoever
// meters must therefore compile the original first: this test pins why.
func TestRefillNeedsTheOriginalValidated(t *testing.T) {
	refill := single(body(0, opI64Const, 1, opGlobalSet, 0, opLocalGet, 0))
	ctx := context.Background()
	rt := wazero.NewRuntime(ctx)
	defer rt.Close(ctx)
	if _, err := rt.CompileModule(ctx, refill); err == nil {
		t.Fatal("the original compiles")
	}
	if _, err := rt.CompileModule(ctx, inject(t, refill)); err != nil {
		t.Fatalf("the metered form does not compile, so the order would not matter: %v", err)
	}
}

// Forms that were kept on disk must not outlive a change of the rewriter.
func TestVersionNamesTheForm(t *testing.T) {
	h := sha256.New()
	h.Write(inject(t, single(body(0, opLocalGet, 0, 0x10, 0))))
	for seed := range uint64(50) {
		code := emitAll(nil, generate(rand.New(rand.NewPCG(seed, 7)), 5, 0, 0))
		h.Write(inject(t, single(body(locals-1+3, append(code, opLocalGet, 0)...))))
	}
	for seed := range uint64(20) {
		_, code := enteredProgram(seed)
		h.Write(inject(t, named(body(locals-1+3, code...), "f")))
	}
	h.Write(inject(t, tabled([]byte{0, 10}, body(0, opLocalGet, 0))))
	const want = "6 8e4d143f4ce520d8"
	if got := fmt.Sprintf("%d %x", Version, h.Sum(nil)[:8]); got != want {
		t.Errorf("metered forms are %s, were %s: raise Version and note the new digest here", got, want)
	}
}

func sized(b []byte) []byte { return append(appendU32(nil, uint32(len(b))), b...) }

// body is a function with the given number of i32 locals.
func body(locals uint32, code ...byte) []byte {
	decl := []byte{0}
	if locals > 0 {
		decl = append(appendU32([]byte{1}, locals), valI32)
	}
	return sized(append(decl, append(code, opEnd)...))
}

// parts are those of a module with one memory page and one exported function f: (i32) -> i32.
func parts(f []byte) wasmtest.Assembly {
	return wasmtest.Assembly{Funcs: []wasmtest.Function{{Name: "f", Sig: "i>i"}}}.
		Replacing(secMemory, wasmtest.Vector([]byte{1, 1, 16})).Replacing(secCode, wasmtest.Vector(f))
}

func single(f []byte) []byte { return parts(f).Bytes() }

// tabled is single with one table of functions, whose limits are given, 16 elements and 128 bytes to fill it and memory
// from.
func tabled(limits []byte, f []byte) []byte {
	elements := []byte{1, 0} // passive, of functions
	elements = append(elements, wasmtest.Vector(slices.Repeat([][]byte{{0}}, 16)...)...)
	return parts(f).Replacing(secTable, wasmtest.Vector(append([]byte{valFuncref}, limits...))).
		Replacing(secElement, wasmtest.Vector(elements)).Replacing(secDataCount, []byte{1}).
		Replacing(secData, wasmtest.Vector(append([]byte{1}, sized(make([]byte, 128))...))).Bytes()
}
