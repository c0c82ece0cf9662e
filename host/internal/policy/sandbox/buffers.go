package sandbox

import (
	"fmt"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
)

type buffer struct{ ptr, size uint32 }

const bufferAlign = 16

// RequireBuffer requests a buffer that the guest must provide.
func (in *Instance) RequireBuffer(kind int, size uint32) error {
	err := in.OfferBuffer(kind, size)
	if err == nil && in.stack[0] == 0 {
		err = in.Fault(abi.ExportBuffer, fmt.Sprintf("gave no room of %d bytes for kind %d", size, kind), nil)
	}
	return err
}

// OfferBuffer requests a buffer that is optional for the guest; see [Instance.HasBuffer].
func (in *Instance) OfferBuffer(kind int, size uint32) error {
	f := in.Export(abi.ExportBuffer)
	if err := in.Call(&f, uint64(kind), uint64(size), Setup, setupFuel); err != nil {
		return err
	}
	if in.stack[0] == 0 {
		return nil
	}
	ptr := uint32(in.stack[0])
	if ptr%bufferAlign != 0 {
		return in.Fault(f.Name, fmt.Sprintf("gave %#x for kind %d, which is not a multiple of %d", ptr, kind, bufferAlign),
			nil)
	}
	for other, b := range in.bufs {
		if other != kind && uint64(ptr) < uint64(b.ptr)+uint64(b.size) && uint64(b.ptr) < uint64(ptr)+uint64(size) {
			return in.Fault(f.Name, fmt.Sprintf("gave %d bytes at %#x for kind %d, which overlap those of kind %d", size, ptr,
				kind, other), nil)
		}
	}
	in.bufs[kind] = buffer{ptr, size}
	_, err := in.View(kind, size)
	return err
}

// HasBuffer reports whether the guest provided a buffer of the kind with at least n bytes.
func (in *Instance) HasBuffer(kind int, n uint32) bool {
	return in.bufs[kind].ptr != 0 && in.bufs[kind].size >= n
}

// BufferSize returns the size of the guest's buffer; 0 without one.
func (in *Instance) BufferSize(kind int) uint32 { return in.bufs[kind].size }

// View returns the first n bytes of a buffer, valid until the next call. It is checked against the memory each time,
// because the guest may have grown the memory.
func (in *Instance) View(kind int, n uint32) ([]byte, error) {
	if in.dead != nil {
		return nil, in.dead
	}
	at := in.bufs[kind]
	b, ok := in.mem.Read(at.ptr, n)
	if !ok || n > at.size || at.ptr == 0 {
		return nil, in.Fault(abi.ExportBuffer, fmt.Sprintf("%d bytes at %#x of kind %d lie outside its memory of %d bytes", n,
			at.ptr, kind, in.mem.Size()), nil)
	}
	return b, nil
}

// text reads n bytes at the guest's pointer, at most maxTextBytes.
func (in *Instance) text(ptr, n uint64) ([]byte, bool) {
	return in.mem.Read(uint32(ptr), min(uint32(n), maxTextBytes))
}

// Records returns the beginning of a buffer as n records.
func Records[T any](in *Instance, kind int, n uint32) ([]T, error) {
	b, err := in.View(kind, n*uint32(unsafe.Sizeof(*new(T))))
	if err != nil || n == 0 {
		return nil, err
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n), nil
}
