package sim

import (
	"context"
	"encoding/binary"
	"hash/fnv"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
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
