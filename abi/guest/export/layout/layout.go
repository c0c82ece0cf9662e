//go:build wasip1

package layout

import (
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/guest/internal/export"
)

var policy guest.Layouter

// Export registers the constructor of the module's layout policy. Call it from init.
func Export[T guest.Layouter](make func(guest.Info) (T, error)) {
	export.Register(func(info guest.Info) (any, error) {
		p, err := make(info)
		policy = p
		return p, err
	})
}

//go:wasmexport kv_layout
func kvLayout(n, stride uint32) uint64 {
	args := export.Buffer(abi.BufferArgs)
	if len(args) < abi.LayoutHeaderSize || policy == nil {
		return abi.Pack(abi.StatusBadInput, 0)
	}
	h := *(*abi.LayoutHeader)(unsafe.Pointer(&args[0]))
	planes, ok := export.Records[abi.Plane](args[abi.LayoutHeaderSize:], n, stride)
	if !ok || h.Planes != n {
		return abi.Pack(abi.StatusBadInput, 0)
	}
	dst := export.Result[abi.Segment]()
	segments := policy.Layout(h, planes, dst[:0])
	if len(segments) > len(dst) {
		return abi.Pack(abi.StatusNoSpace, 0)
	}
	return abi.Pack(abi.StatusOK, uint32(len(segments)))
}
