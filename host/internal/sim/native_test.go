package sim

import (
	"maps"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/plugins/arc"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/lru"
	"github.com/kvhost/kvhost/plugins/prefix"
	"github.com/kvhost/kvhost/plugins/reuse"
	"github.com/kvhost/kvhost/plugins/s3fifo"
	"github.com/kvhost/kvhost/plugins/sieve"
)

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
