//go:build wasip1

package evict

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/guest/export"
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
	batch, ok := export.Records[abi.Event](export.Buffer(abi.BufferEvents), n, stride)
	if !ok || policy == nil {
		return int32(abi.StatusBadInput)
	}
	policy.Events(batch)
	return int32(abi.StatusOK)
}

//go:wasmexport kv_step
func kvStep(n, stride uint32) uint64 {
	ask, ok := export.Records[abi.Ask](export.Buffer(abi.BufferArgs), 1, abi.AskSize)
	if !ok || policy == nil {
		return abi.Pack(abi.StatusBadInput, 0)
	}
	if n > 0 {
		if s := kvEvents(n, stride); s != 0 {
			return abi.Pack(abi.Status(s), 0)
		}
	}
	dst := export.Result[uint32]()
	if uint64(ask[0].MaxVictims) < uint64(len(dst)) {
		dst = dst[:ask[0].MaxVictims]
	}
	return abi.Pack(abi.StatusOK, uint32(policy.Victims(ask[0], dst)))
}
