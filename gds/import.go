package gds

import (
	"fmt"
	"unsafe"
)

const ipcHandleBytes = 64

// Values of the CUDA driver's header. A test compares them with the header (layout/layout.c).
const (
	attributeDeviceOrdinal = 9 // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
	ipcLazyPeerAccess      = 1 // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
)

// Import is another process's device memory, mapped here. Imports of one allocation share a mapping, until the last is
// closed.
type Import struct {
	Base uint64
	Size int64

	gpu    *GPU
	handle [ipcHandleBytes]byte
	users  int // guarded by gpu.mu
}

// ImportIPC opens a handle of cuIpcGetMemHandle. It maps the whole allocation of the handle: Base is its start, Size
// its length. Memory of another GPU is refused.
func (g *GPU) ImportIPC(handle []byte) (*Import, error) {
	if len(handle) != ipcHandleBytes {
		return nil, fmt.Errorf("%w: a CUDA IPC handle has %d bytes, not %d", ErrImport, ipcHandleBytes, len(handle))
	}
	m := &Import{gpu: g, users: 1, handle: [ipcHandleBytes]byte(handle)}
	err := g.Control(func(t *Thread) error { // one at a time: no other call opens the same handle at that time
		g.mu.Lock()
		have := g.imports[m.handle]
		if have != nil {
			have.users++
		}
		g.mu.Unlock()
		if have != nil {
			m = have
			return nil
		}
		if err := t.openIPC(m); err != nil {
			return fmt.Errorf("%w: %w", ErrImport, err)
		}
		g.mu.Lock()
		g.imports[m.handle] = m
		g.mu.Unlock()
		return nil
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// openIPC opens m.handle with lazy peer access, the only flag there is.
func (t *Thread) openIPC(m *Import) error {
	fn := &t.gpu.driver.fn
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&t.handle)), ipcHandleBytes), m.handle[:])
	if err := t.callIPCOpen(ipcLazyPeerAccess); err != nil {
		return err
	}
	m.Base = t.out[0]
	err := t.rangeOf(m)
	if err != nil {
		_ = t.call(&fn.ipcCloseMemHandle, uintptr(m.Base))
	}
	return err
}

// rangeOf asks the driver for the import's address and size, since a client's values are not trusted.
func (t *Thread) rangeOf(m *Import) error {
	fn := &t.gpu.driver.fn
	if err := t.call(&fn.memGetAddressRange, t.outAt(0), t.outAt(1), uintptr(m.Base)); err != nil {
		return err
	}
	if t.out[0] != m.Base {
		return fmt.Errorf("gds: the handle opened at %#x inside an allocation at %#x", m.Base, t.out[0])
	}
	m.Size = int64(t.out[1])
	return t.checkOwner(m.Base)
}

// checkOwner refuses memory of another GPU, which the driver would also map.
func (t *Thread) checkOwner(address uint64) error {
	t.out[2] = 0
	if err := t.call(&t.gpu.driver.fn.pointerGetAttribute, t.outAt(2), attributeDeviceOrdinal,
		uintptr(address)); err != nil {
		return err
	}
	if ordinal := int(int32(t.out[2])); ordinal != t.gpu.Ordinal {
		return fmt.Errorf("gds: the memory is of GPU %d here, not of GPU %d (%s)", ordinal, t.gpu.Ordinal, t.gpu.UUID)
	}
	return nil
}

// Close closes one import, and unmaps the memory after the last. Nothing may be able to touch it any more.
func (m *Import) Close() error {
	g := m.gpu
	if g.Err() != nil {
		return nil // a lost context has no mappings
	}
	return g.Control(func(t *Thread) error { // one at a time with ImportIPC
		g.mu.Lock()
		m.users--
		last := m.users == 0
		if last {
			delete(g.imports, m.handle)
		}
		g.mu.Unlock()
		if !last {
			return nil
		}
		return t.call(&g.driver.fn.ipcCloseMemHandle, uintptr(m.Base))
	})
}
