package gds

import "unsafe"

// callIPCOpen opens t.handle; the address comes in t.out[0]. The handle goes by value: a structure of 64 bytes is
// passed as the address of a copy.
func (t *Thread) callIPCOpen(flags uintptr) error {
	return t.call(&t.gpu.driver.fn.ipcOpenMemHandle, t.outAt(0), uintptr(unsafe.Pointer(&t.handle)), flags)
}
