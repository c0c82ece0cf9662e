//go:build wasip1

package export

import (
	"unsafe"

	"github.com/kvhost/kvhost/abi"
)

const (
	alignment = 16
	maxBuffer = 1 << 30
)

var buffers [abi.BufferKinds][]byte

//go:wasmexport kv_buffer
func kvBuffer(kind, n uint32) uint32 {
	if kind >= abi.BufferKinds || n > maxBuffer {
		return 0
	}
	if len(buffers[kind]) < int(n) || n == 0 {
		// Go's allocator does not move memory, and the package variable keeps it alive.
		b := make([]byte, n+alignment)
		skip := -uintptr(unsafe.Pointer(&b[0])) & (alignment - 1)
		buffers[kind] = b[skip : skip+uintptr(n) : skip+uintptr(n)]
		if n == 0 {
			return uint32(uintptr(unsafe.Pointer(&b[skip])))
		}
	}
	return uint32(uintptr(unsafe.Pointer(&buffers[kind][0])))
}

// Buffer returns the memory of a kind of buffer. It is empty until the host has asked for the buffer.
func Buffer(kind int) []byte { return buffers[kind] }

// Records returns the n records of the batch in b without a copy. Records of a newer host may be longer than this
// guest's T. They are first moved together, which overwrites the parts that T does not have.
func Records[T any](b []byte, n, stride uint32) ([]T, bool) {
	size := uint32(unsafe.Sizeof(*new(T)))
	if stride < size || uint64(n)*uint64(stride) > uint64(len(b)) {
		return nil, false
	}
	if n == 0 {
		return nil, true
	}
	if stride > size {
		for i := uint32(1); i < n; i++ {
			copy(b[i*size:], b[i*stride:i*stride+size])
		}
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n), true
}

// Result returns the RESULT buffer as an array of T.
func Result[T any]() []T {
	b := buffers[abi.BufferResult]
	n := uintptr(len(b)) / unsafe.Sizeof(*new(T))
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n)
}
