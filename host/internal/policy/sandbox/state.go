package sandbox

import (
	"fmt"

	"github.com/kvhost/kvhost/abi"
)

// MaxState bounds the state that a guest may save.
const MaxState = 1 << 30

// Save asks the guest for its state. ok is false if it has none, or has no buffer of limit bytes.
func (in *Instance) Save(limit, slots uint32) (data []byte, ok bool, err error) {
	limit = min(limit, MaxState)
	if in.bufs[abi.BufferState].size < limit {
		if err := in.OfferBuffer(abi.BufferState, limit); err != nil || in.bufs[abi.BufferState].size < limit {
			return nil, false, err
		}
	}
	f := in.Export(abi.ExportSave)
	n, ok, err := in.Count(&f, uint64(limit), 0, Setup, stateFuel(limit, slots))
	if err != nil || !ok {
		return nil, false, err
	}
	if n > limit {
		return nil, false, in.Fault(f.Name, fmt.Sprintf("kept %d bytes of state when given %d", n, limit), nil)
	}
	b, err := in.View(abi.BufferState, n)
	return append([]byte{}, b...), err == nil, err
}

// Load passes a state to the guest, before any call of its role. ok is false if the guest cannot use it.
func (in *Instance) Load(data []byte, slots uint32) (ok bool, err error) {
	size := uint32(len(data))
	if err := in.OfferBuffer(abi.BufferState, size); err != nil || in.bufs[abi.BufferState].size < size {
		return false, err
	}
	b, err := in.View(abi.BufferState, size)
	if err != nil {
		return false, err
	}
	copy(b, data)
	f := in.Export(abi.ExportLoad)
	return in.Status(&f, uint64(size), 0, Setup, stateFuel(size, slots))
}
