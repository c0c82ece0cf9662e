package gds

import "unsafe"

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
