//go:build wasip1

package admit

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/guest/internal/export"
)

var policy guest.Admitter

// Export registers the constructor of the module's admission policy. Call it from init.
func Export[T guest.Admitter](make func(guest.Info) (T, error)) {
	export.Register(func(info guest.Info) (any, error) {
		p, err := make(info)
		policy = p
		return p, err
	})
}

//go:wasmexport kv_admit
func kvAdmit(n, stride uint32) uint64 {
	batch, ok := export.Records[abi.Candidate](export.Buffer(abi.BufferArgs), n, stride)
	if !ok || policy == nil {
		return abi.Pack(abi.StatusBadInput, 0)
	}
	dst := export.Result[bool]() // a Go bool is one byte, 0 or 1
	if uint64(n) > uint64(len(dst)) {
		return abi.Pack(abi.StatusNoSpace, 0)
	}
	clear(dst[:n])
	policy.Admit(batch, dst[:n])
	return abi.Pack(abi.StatusOK, n)
}
