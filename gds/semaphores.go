package gds

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Semaphores are timeline semaphores: 64-bit counters in device memory. The other side's streams wait for them
// (cuStreamWaitValue64) and advance them (cuStreamWriteValue64). This side reads and writes them with short commands,
// so its streams never block on a value that does not come.
type Semaphores struct {
	gpu     *GPU
	address uint64
	n       int
	scratch []byte // mapped memory, used by the control thread only
}

// NewSemaphores returns the n semaphores at an address, which must be a multiple of 8.
func (g *GPU) NewSemaphores(address uint64, n int) (*Semaphores, error) {
	if address%8 != 0 || n < 1 {
		return nil, fmt.Errorf("%w: %d semaphores at %#x", ErrConfig, n, address)
	}
	scratch, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("gds: map memory for semaphores: %w", err)
	}
	return &Semaphores{gpu: g, address: address, n: n, scratch: scratch}, nil
}

// Load reads semaphore i.
func (w *Semaphores) Load(i int) (v uint64, err error) {
	err = w.gpu.Control(func(t *Thread) error {
		err := t.Read(w.scratch[:8], w.address+8*uint64(i))
		v = binary.LittleEndian.Uint64(w.scratch)
		return err
	})
	return v, err
}

// Store writes semaphore i. The write is ordered after all work on device memory that this process has waited for.
func (w *Semaphores) Store(i int, v uint64) error {
	return w.gpu.Control(func(t *Thread) error {
		at := w.address + 8*uint64(i)
		if f := &w.gpu.driver.fn.streamWriteValue64; f.addr != 0 {
			if err := t.call(f, t.stream, uintptr(at), uintptr(v), 0); err != nil {
				return err
			}
			return t.wait()
		}
		binary.LittleEndian.PutUint64(w.scratch, v)
		return t.Write(at, w.scratch[:8])
	})
}

// Close releases the scratch memory of this process. The memory of the semaphores remains the caller's.
func (w *Semaphores) Close() error { return unix.Munmap(w.scratch) }
