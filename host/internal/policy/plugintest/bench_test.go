package plugintest

import (
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/host/internal/policy/policytest"
)

// What is measured is there for every role; how long it took is nobody's promise.
func TestBench(t *testing.T) {
	dir := policytest.Dir(t)
	for name, kinds := range map[string]int{"lru": 2, "fanout": 1, "blockmajor": 1} {
		out, err := Bench(t.Context(), filepath.Join(dir, name+".wasm"), Options{Cache: policytest.Cache(t), Slots: 1 << 10})
		if err != nil || len(out) != kinds {
			t.Fatalf("%s: %+v, %v", name, out, err)
		}
		for _, m := range out {
			if m.Module.Nanos <= 0 || m.Builtin.Nanos <= 0 || m.Module.Fuel <= 0 || m.Builtin.Fuel != 0 {
				t.Errorf("%s: %+v", name, m)
			}
		}
	}
}
