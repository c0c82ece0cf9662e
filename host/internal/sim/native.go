package sim

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/plugins/arc"
	"github.com/kvhost/kvhost/plugins/clock"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/gdsf"
	"github.com/kvhost/kvhost/plugins/lfu"
	"github.com/kvhost/kvhost/plugins/lirs"
	"github.com/kvhost/kvhost/plugins/lru"
	"github.com/kvhost/kvhost/plugins/prefix"
	"github.com/kvhost/kvhost/plugins/reuse"
	"github.com/kvhost/kvhost/plugins/s3fifo"
	"github.com/kvhost/kvhost/plugins/sieve"
	"github.com/kvhost/kvhost/plugins/twoq"
	"github.com/kvhost/kvhost/plugins/wtinylfu"
)

var natives = map[string]func(guest.Info) (any, error){
	"arc":      func(i guest.Info) (any, error) { return arc.New(i) },
	"clock":    func(i guest.Info) (any, error) { return clock.New(i) },
	"fifo":     func(i guest.Info) (any, error) { return fifo.New(i) },
	"gdsf":     func(i guest.Info) (any, error) { return gdsf.New(i) },
	"lfu":      func(i guest.Info) (any, error) { return lfu.New(i) },
	"lirs":     func(i guest.Info) (any, error) { return lirs.New(i) },
	"lru":      func(i guest.Info) (any, error) { return lru.New(i) },
	"prefix":   func(i guest.Info) (any, error) { return prefix.New(i) },
	"s3fifo":   func(i guest.Info) (any, error) { return s3fifo.New(i) },
	"sieve":    func(i guest.Info) (any, error) { return sieve.New(i) },
	"twoq":     func(i guest.Info) (any, error) { return twoq.New(i) },
	"wtinylfu": func(i guest.Info) (any, error) { return wtinylfu.New(i) },
}

// nativeAdmits are admit policies without wasm.
var nativeAdmits = map[string]func(guest.Info) (any, error){
	"reuse": func(i guest.Info) (any, error) { return reuse.New(i) },
}

// Natives are the first-party eviction policies that [Native] links, sorted.
func Natives() []string { return slices.Sorted(maps.Keys(natives)) }

// Native links a first-party eviction policy without wasm, to measure the cost of the sandbox.
func Native(name string) (*policy.Module, error) {
	f, ok := natives[name]
	if !ok {
		return nil, fmt.Errorf("%w: no native policy %q (%s)", ErrPolicy, name, strings.Join(Natives(), ", "))
	}
	return policy.NativeModule(name, []abi.Role{abi.RoleEvict}, f), nil
}

// nativeAdmit links a first-party admit policy without wasm.
func nativeAdmit(name string) (*policy.Module, error) {
	f, ok := nativeAdmits[name]
	if !ok {
		return nil, fmt.Errorf("%w: no native admit policy %q (%s)", ErrPolicy, name,
			strings.Join(slices.Sorted(maps.Keys(nativeAdmits)), ", "))
	}
	return policy.NativeModule(name, []abi.Role{abi.RoleAdmit}, f), nil
}
