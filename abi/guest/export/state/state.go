//go:build wasip1

package state

import (
	"errors"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/guest/internal/export"
)

//go:wasmexport kv_save
func kvSave(limit uint32) uint64 {
	s, b := export.Saver(), export.Buffer(abi.BufferState)
	if s == nil {
		return abi.Pack(abi.StatusDefault, 0)
	}
	if uint64(limit) > uint64(len(b)) {
		return abi.Pack(abi.StatusBadInput, 0)
	}
	state, err := s.Save(b[:0:limit], int(limit))
	if errors.Is(err, guest.ErrStateSize) {
		return abi.Pack(abi.StatusDefault, 0)
	}
	if err != nil {
		export.Fail(err)
		return abi.Pack(abi.StatusInternal, 0)
	}
	if len(state) > int(limit) {
		return abi.Pack(abi.StatusNoSpace, 0)
	}
	copy(b, state) // copies nothing if the state was written in place
	return abi.Pack(abi.StatusOK, uint32(len(state)))
}

//go:wasmexport kv_load
func kvLoad(n uint32) int32 {
	s, b := export.Saver(), export.Buffer(abi.BufferState)
	if s == nil {
		return int32(abi.StatusDefault)
	}
	if uint64(n) > uint64(len(b)) {
		return int32(abi.StatusBadInput)
	}
	if err := s.Load(b[:n]); err != nil {
		export.Fail(err)
		return int32(abi.StatusDefault) // the policy is as after New
	}
	return int32(abi.StatusOK)
}
