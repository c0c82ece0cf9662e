package transfer

import (
	"fmt"
	"runtime/debug"
	"slices"
	"unsafe"
)

// A client's memory is a file that it shares. If the file shrinks, or the client removes pages from it, an access to
// the mapping raises a SIGBUS. Guard turns that into an error.

// Guard runs fn, which touches the client memory in regions, and returns [ErrMemory] if that memory is gone. A fault at any
// other address is a bug, and panics.
func Guard(regions [][]byte, fn func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		fault, ok := v.(interface{ Addr() uintptr })
		if !ok || !within(regions, fault.Addr()) {
			panic(v)
		}
		err = fmt.Errorf("%w: fault at %#x: its file has shrunk, or its client has taken the page out of it", ErrMemory, fault.Addr())
	}()
	return fn()
}

func within(regions [][]byte, address uintptr) bool {
	return slices.ContainsFunc(regions, func(r []byte) bool {
		start := uintptr(unsafe.Pointer(unsafe.SliceData(r)))
		return address >= start && address < start+uintptr(len(r))
	})
}
