package gds

import "unsafe"

// callIPCOpen opens t.handle; the address is in t.out[0]. The handle is passed by value: the address of a copy, for
// a structure of 64 bytes.
func (t *Thread) callIPCOpen(flags uintptr) error {
	return t.call(&t.gpu.driver.fn.ipcOpenMemHandle, t.outAt(0), uintptr(unsafe.Pointer(&t.handle)), flags)
}
