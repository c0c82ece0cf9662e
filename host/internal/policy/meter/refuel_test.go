package meter

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
)

// pump gives so much more whenever a guest has run out, and remembers how far it was below.
type pump struct {
	slice  int64
	given  int64
	lowest int64
}

func (p *pump) Before(_ context.Context, m api.Module, _ api.FunctionDefinition, _ []uint64, _ experimental.StackIterator) {
	left := int64(fuel(m).Get())
	p.lowest = min(p.lowest, left)
	give := p.slice - left
	p.given += give
	fuel(m).Set(uint64(left + give))
}

func (p *pump) After(context.Context, api.Module, api.FunctionDefinition, []uint64) {}
func (p *pump) Abort(context.Context, api.Module, api.FunctionDefinition, error)    {}

// pumped is a module whose fuel comes in slices.
func pumped(t testing.TB, wasm []byte, p *pump) api.Module {
	t.Helper()
	ctx := experimental.WithFunctionListenerFactory(context.Background(), experimental.FunctionListenerFactoryFunc(
		func(def api.FunctionDefinition) experimental.FunctionListener {
			if slices.Contains(def.ExportNames(), Refuel) {
				return p
			}
			return nil
		}))
	rt := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig())
	t.Cleanup(func() { rt.Close(ctx) })
	m, err := rt.InstantiateWithConfig(ctx, wasm, wazero.NewModuleConfig().WithName("").WithStartFunctions())
	if err != nil {
		t.Fatalf("instantiate: %v", err)
	}
	fuel(m).Set(uint64(p.slice))
	p.given = p.slice
	return m
}

// A guest that is given its fuel bit by bit does what it does with all of it at once, for as much, wherever it is held
// up; and it never gets far without asking.
func TestFuelInSlices(t *testing.T) {
	ctx := context.Background()
	run := func(seed uint64, wasm []byte, arg uint64) {
		t.Helper()
		whole := instantiate(t, wasm)
		fuel(whole).Set(math.MaxInt64)
		want, err := whole.ExportedFunction("f").Call(ctx, arg)
		testenv.OK(t, err)
		cost := math.MaxInt64 - int64(fuel(whole).Get())
		for _, slice := range []int64{0, 1, 37, 1000} {
			p := &pump{slice: slice}
			m := pumped(t, wasm, p)
			got, err := m.ExportedFunction("f").Call(ctx, arg)
			if err != nil || got[0] != want[0] {
				t.Fatalf("seed %d, slices of %d: %v %v in place of %v", seed, slice, got, err, want)
			}
			if spent := p.given - int64(fuel(m).Get()); spent != cost {
				t.Errorf("seed %d, slices of %d: %d in place of %d", seed, slice, spent, cost)
			}
			if p.lowest < -2*unseen {
				t.Errorf("seed %d: went %d below zero", seed, -p.lowest)
			}
		}
	}
	for seed := range uint64(25) {
		code := emitAll(nil, generate(rand.New(rand.NewPCG(seed, 7)), 5, 0, 0))
		run(seed, inject(t, single(body(locals-1+3, append(code, opLocalGet, 0)...))), seed)
	}
	for seed := range uint64(12) {
		_, code := enteredProgram(seed)
		run(seed, inject(t, named(body(locals-1+3, code...), "f")), 0)
	}
}

// A function that has no fuel does little before it is held up, however it is built.
func TestLittleRunsUnseen(t *testing.T) {
	const cost = 16
	work := func(n int) []byte { // adds one to the word at 0
		return slices.Repeat([]byte{opI32Const, 0, opI32Const, 0, 0x28, 2, 0, opI32Const, 1, 0x6a, 0x36, 2, 0}, n)
	}
	dispatch := func(first, second []byte) []byte { // to the end of either block, by local 0, for ever
		return slices.Concat([]byte{opLoop, blockEmpty, opBlock, blockEmpty, opBlock, blockEmpty, opLocalGet, 0, opBranchTable, 1, 0, 1, opEnd},
			first, []byte{opEnd}, second, []byte{opBranch, 0, opEnd, opLocalGet, 0})
	}
	leaf := slices.Concat([]byte{opLoop, blockEmpty}, work(1), []byte{opBranch, 0, opEnd, opLocalGet, 0})
	for what, code := range map[string][]byte{
		"loop":                leaf,
		"loop with a result":  slices.Concat([]byte{opLoop, valI32}, work(1), []byte{opBranch, 0, opEnd}),
		"large loop":          slices.Concat([]byte{opLoop, blockEmpty}, work(2000), []byte{opBranch, 0, opEnd, opLocalGet, 0}),
		"dispatch":            dispatch(work(3), work(3)),
		"dispatch, large":     dispatch(work(2000), work(2000)),
		"recursion":           slices.Concat(work(1), []byte{opLocalGet, 0, opCall, 0}),
		"recursion, twice":    slices.Concat(work(1), []byte{opLocalGet, 0, opCall, 0, 0x1a, opLocalGet, 0, opCall, 0}),
		"much in one go":      slices.Concat(work(2000), []byte{opLocalGet, 0}),
		"loop within a loop":  slices.Concat([]byte{opLoop, blockEmpty}, work(1), leaf, []byte{0x1a, opBranch, 0, opEnd, opLocalGet, 0}),
		"dispatch in itself":  dispatch(nil, slices.Concat(work(3), dispatch(work(3), work(3)), []byte{0x1a})),
		"recursion in a loop": slices.Concat([]byte{opLoop, blockEmpty}, work(1), []byte{opLocalGet, 0, opCall, 0, 0x1a, opBranch, 0, opEnd, opLocalGet, 0}),
	} {
		m := instantiate(t, inject(t, single(body(0, code...))))
		fuel(m).Set(0)
		if _, err := m.ExportedFunction("f").Call(context.Background(), 0); err == nil {
			t.Errorf("%s: returned", what)
		}
		if n, _ := m.Memory().ReadUint32Le(0); n*cost > unseen {
			t.Errorf("%s: %d units' work was done", what, n*cost)
		}
	}
}

// enteredProgram is a function of the kind that gets a second form: local 0 says where it is entered, jumps ahead and
// back between, and the result mixes all locals.
func enteredProgram(seed uint64) (states, []byte) {
	r := rand.New(rand.NewPCG(seed, 11))
	s := states{counter: locals, state: 0, times: byte(r.IntN(20))}
	n := 2 + r.IntN(20)
	for i := range n {
		st := state{body: generate(r, 1, 0, 2), a: byte(1 + r.IntN(locals-1)), how: byte(r.IntN(4)), next: byte(r.IntN(n))}
		if left := n - 1 - i; left > 0 {
			st.skip = byte(r.IntN(left))
		} else if st.how >= 2 {
			st.how = 1
		}
		s.list = append(s.list, st)
	}
	code := s.emit(nil)
	for i := byte(0); i < locals; i++ {
		code = append(code, opLocalGet, i)
		if i > 0 {
			code = append(code, 0x73)
		}
	}
	return s, code
}

// named is single with a name for the function.
func named(f []byte, as string) []byte {
	names := wasmtest.Join(wasmtest.Text("name"), []byte{1}, sized(wasmtest.Join(appendU32(nil, 1), []byte{0}, wasmtest.Text(as))))
	return append(single(f), wasmtest.Section(secCustom, names)...)
}

func checkEntered(t *testing.T, seed uint64, entry uint32) (second bool) {
	s, code := enteredProgram(seed)
	_, second = straighten(append(code, opEnd))
	m := machine{}
	m.local[0] = entry
	s.run(&m)
	want := m.local[0] ^ m.local[1] ^ m.local[2] ^ m.local[3]
	f := body(locals-1+3, code...)
	ctx := context.Background()
	for what, wasm := range map[string][]byte{"plain": single(f), "one form": inject(t, single(f)), "two forms": inject(t, named(f, "f")), "of a library": inject(t, named(f, "runtime.f"))} {
		mod := instantiate(t, wasm)
		if what != "plain" {
			fuel(mod).Set(math.MaxInt64)
		}
		got, err := mod.ExportedFunction("f").Call(ctx, uint64(entry))
		if err != nil || uint32(got[0]) != want {
			t.Fatalf("seed %d, entered at %d: %s gives %v %v, the program %d", seed, entry, what, got, err, want)
		}
		if what == "plain" {
			continue
		}
		spent := uint64(math.MaxInt64) - fuel(mod).Get()
		if least := m.steps - 3*m.turns; spent < least {
			t.Fatalf("seed %d, entered at %d: %s spent %d for %d instructions", seed, entry, what, spent, least)
		}
		fresh := instantiate(t, wasm)
		fuel(fresh).Set(spent - 1)
		if _, err := fresh.ExportedFunction("f").Call(ctx, uint64(entry)); err == nil && int64(fuel(fresh).Get()) >= 0 {
			t.Fatalf("seed %d, entered at %d: %s runs on less than it spends", seed, entry, what)
		}
	}
	return second
}

// Functions with two forms do what they did, wherever they are entered.
func TestStraightenedPrograms(t *testing.T) {
	second := 0
	for seed := range uint64(30) {
		for _, entry := range []uint32{0, uint32(seed%13) + 1} {
			if checkEntered(t, seed, entry) {
				second++
			}
		}
	}
	if second < 30 {
		t.Errorf("only %d of 60 got a second form", second)
	}
}

func FuzzStraightenedPrograms(f *testing.F) {
	f.Add(uint64(1), uint32(0))
	f.Fuzz(func(t *testing.T, seed uint64, entry uint32) { checkEntered(t, seed, entry) })
}

// What is not understood keeps its one form.
func TestNotStraightened(t *testing.T) {
	const set, table = opLocalSet, opBranchTable
	head := func(before []byte, inside ...byte) []byte {
		return wasmtest.Join(before, []byte{opLoop, blockEmpty, opBlock, blockEmpty, opBlock, blockEmpty, opLocalGet, 0, table, 1, 0, 1, opEnd}, inside, []byte{opEnd, opEnd, opEnd})
	}
	jump := []byte{opI32Const, 1, set, 0, opBranch, 1}
	if _, ok := straighten(head(nil, jump...)); !ok {
		t.Error("a jump ahead was not understood")
	}
	for name, code := range map[string][]byte{
		"value not known":         head(nil, opLocalGet, 1, set, 0, opBranch, 1),
		"another variable":        head(nil, opI32Const, 1, set, 1, opBranch, 1),
		"conditional":             head(nil, opI32Const, 1, set, 0, opI32Const, 1, opBranchIf, 1),
		"by a table":              head(nil, wasmtest.Join(jump, []byte{opLocalGet, 1, table, 1, 0, 1, 0})...),
		"a variable set before":   head([]byte{opI32Const, 1, set, 0}, jump...),
		"a loop around":           append(append([]byte{opLoop, blockEmpty}, head(nil, jump...)...), opEnd),
		"two":                     append(head(nil, jump...)[:len(head(nil, jump...))-1], head(nil, jump...)...),
		"no jump":                 {opEnd},
		"negative":                head(nil, opI32Const, 0x7f, set, 0, opBranch, 1),
		"something in the middle": head(nil, opI32Const, 1, set, 0, 0x01, opBranch, 1),
		"cut":                     head(nil, jump...)[:9],
	} {
		if _, ok := straighten(code); ok {
			t.Errorf("%s: was straightened", name)
		}
	}
}
