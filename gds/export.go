package gds

import (
	"fmt"
	"os"
	"unsafe"
)

// IPCHandle returns the handle of the allocation for other processes (cuIpcGetMemHandle).
func (b *Buffer) IPCHandle() ([]byte, error) {
	handle := make([]byte, ipcHandleBytes)
	err := b.gpu.Control(func(t *Thread) error {
		if err := t.call(&b.gpu.driver.fn.ipcGetMemHandle, uintptr(unsafe.Pointer(&t.handle)),
			uintptr(b.Address)); err != nil {
			return err
		}
		copy(handle, unsafe.Slice((*byte)(unsafe.Pointer(&t.handle)), ipcHandleBytes))
		return nil
	})
	if err != nil {
		return nil, err
	}
	return handle, nil
}

// NewSegment makes device memory that only its descriptor names (cuMemCreate). [GPU.ImportVMM] maps it, here or in
// another process. It lives as long as a descriptor or a mapping of it. Sizes are multiples of 2 MiB.
func (g *GPU) NewSegment(size int64) (*os.File, error) {
	var f *os.File
	err := g.Control(func(t *Thread) error {
		fn := &g.driver.fn
		t.prop = memAllocationProp{Type: allocationPinned, HandleTypes: handleDescriptor,
			Location: memLocation{locationDevice, int32(g.Ordinal)}}
		if err := t.call(&fn.memCreate, t.outAt(0), uintptr(size), uintptr(unsafe.Pointer(&t.prop)), 0); err != nil {
			return err
		}
		handle := uintptr(t.out[0])
		t.out[1] = 0
		err := t.call(&fn.memExport, t.outAt(1), handle, handleDescriptor, 0)
		if released := t.call(&fn.memRelease, handle); err == nil {
			err = released
		}
		if err == nil {
			f = os.NewFile(uintptr(uint32(t.out[1])), "device memory")
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("gds: %d bytes of shareable memory: %w", size, err)
	}
	return f, nil
}
