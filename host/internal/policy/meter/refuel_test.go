package meter

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"

	"github.com/kvhost/kvhost/abi/testenv"
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
