//go:build wasip1

package export

import (
	"strings"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

var (
	makers     []func(guest.Info) (any, error)
	policies   []any
	namespacer []guest.Namespacer
	strides    abi.Info
)

// Register adds a policy that is made when the host calls kv_init. The role packages call it.
func Register(make func(guest.Info) (any, error)) { makers = append(makers, make) }

// Saver returns the first registered policy that keeps state, or nil.
func Saver() guest.Saver {
	for _, p := range policies {
		if s, ok := p.(guest.Saver); ok {
			return s
		}
	}
	return nil
}

// Strides returns the strides that the host announced.
func Strides() *abi.Info { return &strides }

//go:wasmimport kvhost_1 fail
func hostFail(text string)

// Fail gives the host a text for the negative status that follows.
func Fail(err error) { hostFail(err.Error()) }

// marker names the ABI of the module. The host looks for its name and never calls it.
//
//go:wasmexport kvhost_abi_1
func marker() {}

//go:wasmexport kv_init
func kvInit(n uint32) int32 {
	b := Buffer(abi.BufferInfo)
	if n < abi.InfoSize || uint64(n) > uint64(len(b)) || policies != nil {
		return int32(abi.StatusBadInput)
	}
	in := (*abi.Info)(unsafe.Pointer(&b[0]))
	if in.ABI != abi.Version || in.Size < abi.InfoSize || uint64(in.Size)+uint64(in.ConfigLen) > uint64(n) {
		return int32(abi.StatusBadInput)
	}
	strides = *in
	info := guest.Info{
		MaxSlots: in.MaxSlots, MaxBatch: in.MaxBatch, MaxVictims: in.MaxVictims, MaxNamespaces: in.MaxNamespaces,
		Capacity: in.Capacity, Features: in.Features, Seed: in.Seed,
		Config: config(string(b[in.Size : in.Size+in.ConfigLen])),
	}
	for _, make := range makers {
		p, err := make(info)
		if err != nil {
			Fail(err)
			return int32(abi.StatusBadInput)
		}
		policies = append(policies, p)
		if ns, ok := p.(guest.Namespacer); ok {
			namespacer = append(namespacer, ns)
		}
	}
	return int32(abi.StatusOK)
}

func config(text string) guest.Config {
	c := guest.Config{}
	for line := range strings.SplitSeq(text, "\n") {
		if k, v, ok := strings.Cut(line, "="); ok {
			c[k] = v
		}
	}
	return c
}

//go:wasmexport kv_namespace
func kvNamespace(id, n uint32) int32 {
	b := Buffer(abi.BufferInfo)
	if uint64(n) > uint64(len(b)) {
		return int32(abi.StatusBadInput)
	}
	if len(namespacer) == 0 {
		return int32(abi.StatusOK)
	}
	text := string(b[:n])
	for _, ns := range namespacer {
		ns.Namespace(id, text)
	}
	return int32(abi.StatusOK)
}
