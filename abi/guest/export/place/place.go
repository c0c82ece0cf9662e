//go:build wasip1

package place

import (
	"errors"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/guest/internal/export"
)

var policy guest.Placer

var errUnnamed = errors.New("the policy names no path for this namespace and key")

// Export registers the constructor of the module's place policy. Call it from init.
func Export[T guest.Placer](make func(guest.Info) (T, error)) {
	export.Register(func(info guest.Info) (any, error) {
		p, err := make(info)
		policy = p
		return p, err
	})
}

// roots returns the records of the ROOTS buffer.
func roots() []abi.RootFacts {
	b := export.Buffer(abi.BufferRoots)
	if len(b) < abi.RootsHeaderSize {
		return nil
	}
	h := (*abi.RootsHeader)(unsafe.Pointer(&b[0]))
	facts, ok := export.Records[abi.RootFacts](b[abi.RootsHeaderSize:], h.Count, h.Stride)
	if ok {
		h.Stride = abi.RootFactsSize // the records are adjacent now
	}
	return facts
}

//go:wasmexport kv_place
func kvPlace(n, stride uint32) uint64 {
	batch, ok := export.Records[abi.PlaceQuery](export.Buffer(abi.BufferArgs), n, stride)
	if !ok || policy == nil {
		return abi.Pack(abi.StatusBadInput, 0)
	}
	answers := export.Result[abi.PlaceAnswer]()
	if uint64(n) > uint64(len(answers)) {
		return abi.Pack(abi.StatusNoSpace, 0)
	}
	result := export.Buffer(abi.BufferResult)
	facts := roots()
	off := int(n) * abi.PlaceAnswerSize
	for i := range batch {
		room := result[off:]
		path, root := policy.Place(&batch[i], facts, room[:0])
		if len(path) == 0 {
			export.Fail(errUnnamed)
			return abi.Pack(abi.StatusBadInput, 0)
		}
		if len(path) > len(room) {
			return abi.Pack(abi.StatusNoSpace, 0)
		}
		answers[i] = abi.PlaceAnswer{Root: root, Off: uint32(off), Len: uint32(len(path))}
		off += len(path)
	}
	return abi.Pack(abi.StatusOK, n)
}
