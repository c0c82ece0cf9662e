package meter

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

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
	for seed := range uint64(60) {
		for _, entry := range []uint32{0, uint32(seed%13) + 1} {
			if checkEntered(t, seed, entry) {
				second++
			}
		}
	}
	if second < 60 {
		t.Errorf("only %d of 120 got a second form", second)
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
