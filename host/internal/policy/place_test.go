package policy

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
)

func randomQuery(rng *rand.Rand, namespaces uint32) *abi.PlaceQuery {
	q := &abi.PlaceQuery{Namespace: rng.Uint32N(namespaces), Group: rng.Uint32N(3), Rank: rng.Uint32N(64), KeyLen: 8 + rng.Uint32N(25)}
	for i := range q.Key[:q.KeyLen] {
		q.Key[i] = byte(rng.Uint32())
	}
	return q
}

// checkPlace announces two namespaces and asks for paths, which differ.
func checkPlace(t testing.TB, p *Place) {
	t.Helper()
	for id, text := range []string{"model=a\n", "model=b\n"} {
		testenv.OK(t, p.Namespace(uint32(id), text))
	}
	rng := rand.New(rand.NewPCG(3, 4))
	seen := map[string]bool{}
	for range 100 {
		path, _, err := p.Path(randomQuery(rng, 2), nil)
		if err != nil || seen[string(path)] {
			t.Fatalf("got the path %q, which was given before: %t, %v", path, seen[string(path)], err)
		}
		seen[string(path)] = true
	}
}

func newPlace(t testing.TB, m *Module) *Place {
	t.Helper()
	p, err := m.NewPlace(t.Context(), PlaceOptions{})
	testenv.OK(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func TestPlaceWasmDecidesLikeNative(t *testing.T) {
	wasm, native := newPlace(t, modules["fanout"]), newPlace(t, natives["fanout"])
	checkPlace(t, wasm)
	checkPlace(t, native)
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(g, 5))
			for i := range 300 {
				if i == 100 {
					wasm.SetRoots(make([]abi.RootFacts, g+1))
				}
				q := randomQuery(rng, 2)
				a, _, err1 := wasm.Path(q, nil)
				b, _, err2 := native.Path(q, nil)
				if string(a) != string(b) || err1 != nil || err2 != nil {
					t.Errorf("wasm %s %v, native %s %v", a, err1, b, err2)
					return
				}
			}
		})
	}
	wg.Wait()
	if s := wasm.Stats(); s.Faults != 0 || s.Role != abi.RolePlace || s.Module != "fanout" {
		t.Errorf("the stats of the module are %+v, want no fault", s)
	}
}

func TestPlaceAllocatesNothing(t *testing.T) {
	for _, m := range []*Module{modules["fanout"], natives["fanout"]} {
		p := newPlace(t, m)
		checkPlace(t, p)
		q := randomQuery(rand.New(rand.NewPCG(1, 1)), 2)
		dst := make([]byte, 0, 256)
		if n := testing.AllocsPerRun(500, func() {
			if _, _, err := p.Path(q, dst); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s %s: %v allocations per path", m.Name(), m.Digest(), n)
		}
	}
}
