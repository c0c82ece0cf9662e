package sim

import (
	"context"
	"encoding/binary"
	"hash/fnv"
	"maps"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/plugins/arc"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/lru"
	"github.com/kvhost/kvhost/plugins/prefix"
	"github.com/kvhost/kvhost/plugins/reuse"
	"github.com/kvhost/kvhost/plugins/s3fifo"
	"github.com/kvhost/kvhost/plugins/sieve"
)

// decisions is a digest of every victim that a policy names on a workload, in order, with its position.
func decisions(t testing.TB, w *Workload, m *policy.Module, config policy.Config, capacity int) (digest uint64,
	evictions int) {
	t.Helper()
	e, err := m.NewEvict(context.Background(), policy.EvictOptions{
		MaxSlots: uint32(capacity), Capacity: uint64(capacity) * abi.SizeUnit, Seed: 1, Config: config,
	})
	testenv.OK(t, err)
	defer e.Close()
	h := fnv.New64a()
	c := newCache(w, e, capacity, 1)
	lo := 0
	for i, end := range w.ends {
		before := slices.Clone(c.chunkOf)
		if _, err := c.request(w.ids[lo:end], uint32(i)+1); err != nil {
			t.Fatal(err)
		}
		for slot, chunk := range c.chunkOf {
			if before[slot] != chunk {
				h.Write(binary.LittleEndian.AppendUint64(nil, uint64(slot)<<32|uint64(chunk)))
			}
		}
		lo = int(end)
	}
	return h.Sum64(), c.evictions
}

// Each first-party policy, linked natively and as a module, names the same victims at the same time.
func TestWasmDecidesAsNative(t *testing.T) {
	ctx := context.Background()
	dir := policytest.Dir(t, nativeNames()...)
	w := generated(t, 500)
	configs := map[string][]policy.Config{
		"s3fifo": {{"small": "25", "moveat": "1"}},
	}
	for _, name := range nativeNames() {
		t.Run(name, func(t *testing.T) {
			// What decisions cost is not what this test is about.
			m, err := policy.Open(ctx, name, policy.Options{
				Dir: dir, Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Call: 1 << 30, Record: 1 << 20},
			})
			testenv.OK(t, err)
			defer m.Close(ctx)
			for _, config := range append([]policy.Config{nil}, configs[name]...) {
				for _, capacity := range []int{7, 300} {
					want, evictions := decisions(t, w, native(t, name), config, capacity)
					got, wasmEvictions := decisions(t, w, m, config, capacity)
					if got != want || evictions != wasmEvictions || evictions == 0 {
						t.Errorf("%v, %d chunks: %d evictions, natively %d; decisions %x, natively %x", config,
							capacity, wasmEvictions, evictions, got, want)
					}
				}
			}
		})
	}
}

// natives are the first-party eviction policies, to compare modules with.
var natives = map[string]func(guest.Info) (any, error){
	"arc":    func(i guest.Info) (any, error) { return arc.New(i) },
	"fifo":   func(i guest.Info) (any, error) { return fifo.New(i) },
	"lru":    func(i guest.Info) (any, error) { return lru.New(i) },
	"prefix": func(i guest.Info) (any, error) { return prefix.New(i) },
	"s3fifo": func(i guest.Info) (any, error) { return s3fifo.New(i) },
	"sieve":  func(i guest.Info) (any, error) { return sieve.New(i) },
}

// nativeNames are the keys of natives, sorted.
func nativeNames() []string { return slices.Sorted(maps.Keys(natives)) }

// native links a first-party eviction policy without wasm.
func native(t testing.TB, name string) *policy.Module {
	t.Helper()
	f, ok := natives[name]
	if !ok {
		t.Fatalf("no native policy %q, there are %v", name, nativeNames())
	}
	return policy.NativeModule(name, []abi.Role{abi.RoleEvict}, f)
}

// evicts is a native policy to simulate, or a baseline.
func evicts(t testing.TB, name string) *Policy {
	t.Helper()
	p := &Policy{Text: name, Label: name}
	if name != Belady && name != Infinite {
		p.module = native(t, name)
	}
	return p
}

// reuseAdmits is the admit policy reuse without wasm.
func reuseAdmits(config policy.Config) *Policy {
	p := policyOf(policy.NativeModule("reuse", []abi.Role{abi.RoleAdmit}, func(i guest.Info) (any, error) {
		return reuse.New(i)
	}))
	p.config = config
	return p
}

// policyOf is an open module.
func policyOf(m *policy.Module) *Policy { return &Policy{Text: m.Name(), Label: m.Name(), module: m} }
