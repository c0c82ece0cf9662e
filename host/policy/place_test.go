package policy

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
)

func randomQuery(rng *rand.Rand, namespaces uint32) *abi.PlaceQuery {
	q := &abi.PlaceQuery{Namespace: rng.Uint32N(namespaces), Group: rng.Uint32N(3), Rank: rng.Uint32N(64), KeyLen: 8 + rng.Uint32N(25)}
	for i := range q.Key[:q.KeyLen] {
		q.Key[i] = byte(rng.Uint32())
	}
	return q
}

// checkPlace announces two namespaces and reads paths back.
func checkPlace(t testing.TB, p *Place) {
	t.Helper()
	for id, text := range []string{"model=a\n", "model=b\n"} {
		if err := p.Namespace(uint32(id), text); err != nil {
			t.Fatal(err)
		}
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for range 100 {
		q := randomQuery(rng, 2)
		path, _, err := p.Path(q, nil)
		if err != nil {
			t.Fatal(err)
		}
		id, err := p.Identity(path)
		if err != nil || id.Known != 1 || id.Namespace != q.Namespace || id.Group != q.Group || id.Rank != q.Rank || id.Key != q.Key || id.KeyLen != q.KeyLen {
			t.Fatalf("%s read back as %+v, %v", path, id, err)
		}
	}
	for _, foreign := range []string{"x", "a/b/c.kv", "../x", "", "a//b"} {
		if id, err := p.Identity([]byte(foreign)); err != nil || id.Known != 0 {
			t.Errorf("%q read as %+v, %v", foreign, id, err)
		}
	}
}

func newPlace(t testing.TB, m *Module) *Place {
	t.Helper()
	p, err := m.NewPlace(t.Context(), PlaceOptions{})
	if err != nil {
		t.Fatal(err)
	}
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
		t.Errorf("%+v", s)
	}
}

func TestLayoutWasmDecidesLikeNative(t *testing.T) {
	geometries := []chunk.Geometry{chunk.Uniform(16, 32, 2, 65536), chunk.Uniform(1, 1, 1, 100), {Blocks: 3, Planes: []chunk.Plane{
		{Layer: 2, Part: 1, PageBytes: 10}, {Layer: 1, Part: 0, PageBytes: 4096}, {Layer: 2, Part: 0, PageBytes: 7},
	}}}
	var digests [2][]string
	for i, m := range []*Module{modules["layermajor"], natives["layermajor"]} {
		l, err := m.NewLayout(t.Context(), LayoutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		for ns, g := range geometries {
			plan, err := l.Plan(uint32(ns), 0, fmt.Sprintf("model=%d\n", ns), g)
			if err != nil {
				t.Fatal(err)
			}
			digests[i] = append(digests[i], plan.Digest().String())
		}
	}
	if fmt.Sprint(digests[0]) != fmt.Sprint(digests[1]) {
		t.Errorf("wasm %v, native %v", digests[0], digests[1])
	}
}

// Several queries get what each gets by itself: of a module, of a native policy, of a guest that leaves naming to the
// host, and of one with room for one answer.
func TestPathsAreThoseOfEachByItself(t *testing.T) {
	const result = 4096 + 3<<14
	small := minimal(abi.RolePlace).
		with(abi.ExportBuffer, "ii>i", []byte{0x20, 1}, i32(2000), []byte{0x4b, 0x04, 0x40}, i32(0), []byte{0x0f, 0x0b}, // if len > 2000 { return 0 }
			[]byte{0x20, 0}, i32(14), []byte{0x74}, i32(4096), []byte{0x6a}).
		with(abi.ExportPlace, "ii>I", store32(result, -1), store32(result+4, 16), store32(result+8, 1), store32(result+16, 'a'), packed(0, 1))
	shy := minimal(abi.RolePlace).with(abi.ExportPlace, "ii>I", packed(abi.StatusDefault, 0))
	for name, c := range map[string]struct {
		m     *Module
		calls uint64 // for 40 queries
	}{
		"fanout": {modules["fanout"], 3}, "native": {natives["fanout"], 3}, "small": {open(t, small, Options{SkipSelfTest: true}), 40}, "shy": {open(t, shy, Options{SkipSelfTest: true}), 43},
	} {
		p := newPlace(t, c.m)
		p.asked.Store(verifyEvery + 1) // so that nothing is asked for twice
		for id, text := range []string{"model=a\n", "model=b\n"} {
			if err := p.Namespace(uint32(id), text); err != nil {
				t.Fatal(err)
			}
		}
		rng := rand.New(rand.NewPCG(9, 9))
		queries := make([]abi.PlaceQuery, 40)
		for i := range queries {
			queries[i] = *randomQuery(rng, 2)
		}
		var names PathList
		before := p.Stats().Calls
		if err := p.Paths(queries, &names); err != nil || names.Len() != len(queries) {
			t.Errorf("%s: %d names, %v", name, names.Len(), err)
			continue
		}
		if calls := p.Stats().Calls - before; calls != c.calls {
			t.Errorf("%s: %d calls, want %d", name, calls, c.calls)
		}
		for i := range queries {
			path, root, err := p.Path(&queries[i], nil)
			if err != nil || string(path) != string(names.Path(i)) || root != names.Root(i) {
				t.Errorf("%s: query %d gets %s on root %d, with others %s on root %d: %v", name, i, path, root, names.Path(i), names.Root(i), err)
			}
		}
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
		var names PathList
		queries := make([]abi.PlaceQuery, 40)
		for i := range queries {
			queries[i] = *q
		}
		if n := testing.AllocsPerRun(500, func() {
			if err := p.Paths(queries, &names); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s %s: %v allocations per 40 paths", m.Name(), m.Digest(), n)
		}
	}
}

func BenchmarkPlace(b *testing.B) {
	for _, name := range []string{"native", "wasm"} {
		b.Run(name, func(b *testing.B) {
			m := natives["fanout"]
			if name == "wasm" {
				m = modules["fanout"]
			}
			p := newPlace(b, m)
			checkPlace(b, p)
			q := randomQuery(rand.New(rand.NewPCG(1, 1)), 2)
			q.KeyLen = 32
			dst := make([]byte, 0, 256)
			b.ReportAllocs()
			for b.Loop() {
				if _, _, err := p.Path(q, dst); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
