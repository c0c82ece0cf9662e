package gds

// callIPCOpen opens t.handle; the address is in t.out[0]. The handle is passed by value: 64 bytes go in memory,
// after the six register arguments, of which only two are used.
func (t *Thread) callIPCOpen(flags uintptr) error {
	h := &t.handle
	return t.call(&t.gpu.driver.fn.ipcOpenMemHandle, t.outAt(0), flags, 0, 0, 0, 0,
		uintptr(h[0]), uintptr(h[1]), uintptr(h[2]), uintptr(h[3]), uintptr(h[4]), uintptr(h[5]), uintptr(
			h[6]), uintptr(h[7]))
}
