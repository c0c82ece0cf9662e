//go:build wasip1

package evict

import (
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/guest/internal/export"
)

var policy guest.Evictor

// Export registers the constructor of the module's eviction policy. Call it from init.
func Export[T guest.Evictor](make func(guest.Info) (T, error)) {
	export.Register(func(info guest.Info) (any, error) {
		p, err := make(info)
		policy = p
		return p, err
	})
}

//go:wasmexport kv_events
func kvEvents(n, stride uint32) int32 {
	b := export.Buffer(abi.BufferEvents)
	if stride == abi.EventSize && n-1 < uint32(len(b))/abi.EventSize && policy != nil {
		policy.Events(unsafe.Slice((*abi.Event)(unsafe.Pointer(unsafe.SliceData(b))), n)) // the common case has a call of its own
		return int32(abi.StatusOK)
	}
	batch, ok := export.Records[abi.Event](b, n, stride)
	if !ok || policy == nil {
		return int32(abi.StatusBadInput)
	}
	policy.Events(batch)
	return int32(abi.StatusOK)
}

//go:wasmexport kv_step
func kvStep(n, stride uint32) uint64 {
	args, result := export.Buffer(abi.BufferArgs), export.Buffer(abi.BufferResult)
	if len(args) < abi.AskSize || policy == nil {
		return abi.Pack(abi.StatusBadInput, 0)
	}
	if n > 0 {
		if s := kvEvents(n, stride); s != 0 {
			return abi.Pack(abi.Status(s), 0)
		}
	}
	ask := *(*abi.Ask)(unsafe.Pointer(unsafe.SliceData(args)))
	dst := unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(result))), min(uint32(len(result))/4, ask.MaxVictims))
	return abi.Pack(abi.StatusOK, uint32(policy.Victims(ask, dst)))
}
