package gds

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Words are 64-bit words in device memory by which two sides tell each other how far they are. The other side's streams
// wait for them (cuStreamWaitValue64) and advance them (cuStreamWriteValue64); this side asks and writes by short commands
// of its own, so that no stream here ever stands still for a word that does not come.
type Words struct {
	gpu     *GPU
	address uint64
	n       int
	scratch []byte // mapped; used by the control thread only
}

// NewWords are n words from an address on, which is a multiple of 8.
func (g *GPU) NewWords(address uint64, n int) (*Words, error) {
	if address%8 != 0 || n < 1 {
		return nil, fmt.Errorf("%w: %d words at %#x", ErrConfig, n, address)
	}
	scratch, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("gds: map memory for words: %w", err)
	}
	return &Words{gpu: g, address: address, n: n, scratch: scratch}, nil
}

// Load reads word i.
func (w *Words) Load(i int) (v uint64, err error) {
	err = w.gpu.Control(func(t *Thread) error {
		err := t.Read(w.scratch[:8], w.address+8*uint64(i))
		v = binary.LittleEndian.Uint64(w.scratch)
		return err
	})
	return v, err
}

// Store writes word i, after everything that this process has done to device memory and waited for.
func (w *Words) Store(i int, v uint64) error {
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

// Close gives up what the words need here. Their memory is the caller's.
func (w *Words) Close() error { return unix.Munmap(w.scratch) }
