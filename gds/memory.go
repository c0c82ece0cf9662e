package gds

import (
	"fmt"
	"runtime"
	"unsafe"
)

// pinnedRange is host memory that the driver has page-locked for every GPU.
type pinnedRange struct {
	start, size uintptr
	device      uint64 // address on a GPU
	users       int
}

func startOf(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }

// Pinner returns the GPU's [Pinner]. Memory is registered once for all GPUs, however many of their pinners register
// it.
func (g *GPU) Pinner() Pinner { return Pinner{g} }

// Pinner page-locks staging memory; it satisfies staging.Pinner.
type Pinner struct{ gpu *GPU }

// Register page-locks mem and makes it visible to every GPU.
func (p Pinner) Register(mem []byte) error {
	return p.gpu.Control(func(t *Thread) error { return t.register(mem) })
}

// Unregister undoes Register. Nothing may be in flight there. A lost or closed GPU holds nothing.
func (p Pinner) Unregister(mem []byte) error {
	if p.gpu.Err() != nil {
		return nil
	}
	return p.gpu.Control(func(t *Thread) error { return t.unregister(mem) })
}

func (t *Thread) register(mem []byte) error {
	d := t.gpu.driver
	start, size := startOf(mem), uintptr(len(mem))
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.pinned {
		if r := &d.pinned[i]; r.start == start && r.size == size {
			r.users++
			return nil
		}
	}
	const portable, deviceMap = 1, 2
	if err := t.call(&d.fn.memHostRegister, start, size, portable|deviceMap); err != nil {
		return err
	}
	if err := t.call(&d.fn.memHostGetDevicePointer, t.outAt(0), start, 0); err != nil {
		_ = t.call(&d.fn.memHostUnregister, start)
		return err
	}
	d.pinned = append(d.pinned, pinnedRange{start: start, size: size, device: t.out[0], users: 1})
	return nil
}

func (t *Thread) unregister(mem []byte) error {
	d := t.gpu.driver
	start, size := startOf(mem), uintptr(len(mem))
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.pinned {
		r := &d.pinned[i]
		if r.start != start || r.size != size {
			continue
		}
		if r.users--; r.users > 0 {
			return nil
		}
		d.pinned = append(d.pinned[:i], d.pinned[i+1:]...)
		return t.call(&d.fn.memHostUnregister, start)
	}
	return fmt.Errorf("%w: %d bytes at %#x", ErrUnpinned, size, start)
}

// pinnedAt returns the address of registered memory on a GPU, and whether it is registered.
func (d *Driver) pinnedAt(mem []byte) (uint64, bool) {
	start, size := startOf(mem), uintptr(len(mem))
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.pinned {
		if r := &d.pinned[i]; start >= r.start && start+size <= r.start+r.size {
			return r.device + uint64(start-r.start), true
		}
	}
	return 0, false
}

// Buffer is device memory of this process.
type Buffer struct {
	Address uint64
	Size    int64
	gpu     *GPU
}

// Alloc allocates device memory.
func (g *GPU) Alloc(size int64) (*Buffer, error) {
	b := &Buffer{Size: size, gpu: g}
	err := g.Control(func(t *Thread) error {
		if err := t.call(&g.driver.fn.memAlloc, t.outAt(0), uintptr(size)); err != nil {
			return err
		}
		b.Address = t.out[0]
		return nil
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Free frees the memory. Nothing may use it any more.
func (b *Buffer) Free() error {
	return b.gpu.Control(func(t *Thread) error { return t.call(&b.gpu.driver.fn.memFree, uintptr(b.Address)) })
}

// Fill sets n bytes of device memory.
func (t *Thread) Fill(address uint64, value byte, n int64) error {
	if err := t.call(&t.gpu.driver.fn.memsetD8Async, uintptr(address), uintptr(value), uintptr(n),
		t.stream); err != nil {
		return err
	}
	return t.wait()
}

// Read copies device memory to dst.
func (t *Thread) Read(dst []byte, address uint64) error {
	err := t.copyWait(uint64(startOf(dst)), address, len(dst))
	runtime.KeepAlive(dst)
	return err
}

// Write copies src to device memory.
func (t *Thread) Write(address uint64, src []byte) error {
	err := t.copyWait(address, uint64(startOf(src)), len(src))
	runtime.KeepAlive(src) // this may be the caller's last use of src
	return err
}

// copyWait copies between any two addresses of device or host memory.
func (t *Thread) copyWait(to, from uint64, n int) error {
	if n == 0 {
		return nil
	}
	if err := t.call(&t.gpu.driver.fn.memcpyAsync, uintptr(to), uintptr(from), uintptr(n), t.stream); err != nil {
		return err
	}
	return t.wait()
}
