package gds

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// DirectConfig sizes a direct route.
type DirectConfig struct {
	BufferBytes int64 // device memory of all slots together
	Handles     int   // idle files that stay registered
	// Limit is the longest that an operation may take. Then it is abandoned with a [HungError], and its slot and
	// thread stay in use until it returns. 0: no limit.
	Limit time.Duration
}

// DirectRoute moves whole files between storage and device memory by cuFile. Its slots are device memory registered
// with cuFile. Each has page-locked host memory for the parts of a file that the CPU needs.
type DirectRoute struct {
	gpu     *GPU
	cufile  *CuFile
	cfg     DirectConfig
	Handles *Handles

	mu     sync.Mutex
	free   []*DirectSlot // least recently used first
	taken  int64         // bytes of all slots
	out    int           // slots in use
	hung   int           // slots in use by abandoned operations only; part of out
	closed bool
}

// DirectSlot holds the image of one file in device memory. Its host memory holds the file's head, the places of its
// extents, and their checksums.
type DirectSlot struct {
	Address uint64
	Bytes   int64
	Head    []byte
	Extents []Extent
	Sums    []uint64

	direct *DirectRoute
	notes  []byte
	hung   *HungError // an abandoned operation that still uses the slot
}

// slotUnit is the granularity of slots, which is the driver's granularity of allocation.
const slotUnit = 2 << 20

// NewDirectRoute makes the direct route of a GPU that has file threads. cuFile's driver must be open.
func NewDirectRoute(g *GPU, c *CuFile, cfg DirectConfig) (*DirectRoute, error) {
	switch {
	case cfg.BufferBytes < slotUnit || cfg.Handles < 0 || g.cfg.Files < 1:
		return nil, fmt.Errorf("%w: a direct route with %d bytes, %d handles and %d threads", ErrConfig,
			cfg.BufferBytes, cfg.Handles, g.cfg.Files)
	case g.kernels.sums.function == 0:
		return nil, fmt.Errorf("%w: the checksum kernel", ErrSymbol)
	}
	return &DirectRoute{gpu: g, cufile: c, cfg: cfg, Handles: NewHandles(g, c, cfg.Handles)}, nil
}

// GPU returns the GPU that the slots are on.
func (d *DirectRoute) GPU() *GPU { return d.gpu }

// CuFile returns the library.
func (d *DirectRoute) CuFile() *CuFile { return d.cufile }

// Acquire takes a slot for a file of the given bytes, head bytes and payload extents. It does not wait: [ErrNoSlot]
// says that the memory is in use.
func (d *DirectRoute) Acquire(bytes, head int64, extents int) (*DirectSlot, error) {
	if bytes <= 0 || head <= 0 || extents < 0 || bytes > d.cfg.BufferBytes {
		return nil, fmt.Errorf("%w: %d bytes of %d", ErrNoSlot, bytes, d.cfg.BufferBytes)
	}
	want := (bytes + slotUnit - 1) / slotUnit * slotUnit
	pages := (head + 4095) &^ 4095
	notes := pages + int64(max(1, extents))*int64(unsafe.Sizeof(Extent{})+8)
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil, ErrClosed
	}
	for i := len(d.free) - 1; i >= 0; i-- { // most recently used first, so that few slots stay in use
		if s := d.free[i]; s.Bytes == want && int64(len(s.notes)) >= notes {
			d.free = append(d.free[:i], d.free[i+1:]...)
			d.out++
			d.mu.Unlock()
			s.divide(pages, extents)
			return s, nil
		}
	}
	var old []*DirectSlot // slots of other sizes, to be freed for their memory
	for d.taken+want > d.cfg.BufferBytes && len(d.free) > 0 {
		old = append(old, d.free[0])
		d.taken -= d.free[0].Bytes
		d.free = d.free[1:]
	}
	if d.taken+want > d.cfg.BufferBytes {
		d.free = append(d.free, old...)
		for _, s := range old {
			d.taken += s.Bytes
		}
		d.mu.Unlock()
		return nil, fmt.Errorf("%w: %d of %d bytes are in use", ErrNoSlot, d.taken, d.cfg.BufferBytes)
	}
	d.taken += want
	d.out++
	d.mu.Unlock()
	var errs []error
	for _, s := range old {
		errs = append(errs, s.free())
	}
	s := &DirectSlot{direct: d, Bytes: want}
	err := errors.Join(errs...)
	if err == nil {
		err = s.make(notes)
	}
	if err != nil {
		d.mu.Lock()
		d.taken -= want
		d.out--
		d.mu.Unlock()
		return nil, fmt.Errorf("%w: %w", ErrNoSlot, err)
	}
	s.divide(pages, extents)
	return s, nil
}

// make allocates the memory and registers it.
func (s *DirectSlot) make(notes int64) (err error) {
	d := s.direct
	notes = (notes + 4095) &^ 4095
	if s.notes, err = unix.Mmap(-1, 0, int(notes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		return err
	}
	if err = d.gpu.Pinner().Register(s.notes); err != nil {
		return errors.Join(err, unix.Munmap(s.notes))
	}
	buffer, err := d.gpu.Alloc(s.Bytes)
	if err == nil {
		s.Address = buffer.Address
		err = d.gpu.Control(func(t *Thread) error { return d.cufile.RegisterBuffer(t, s.Address, s.Bytes) })
		if err != nil {
			err = errors.Join(err, buffer.Free())
		}
	}
	if err != nil {
		return errors.Join(err, d.gpu.Pinner().Unregister(s.notes), unix.Munmap(s.notes))
	}
	return nil
}

func (s *DirectSlot) free() error {
	g := s.direct.gpu
	var errs []error
	if g.Err() == nil {
		errs = append(errs, g.Control(func(t *Thread) error { return s.direct.cufile.DeregisterBuffer(t, s.Address) }),
			(&Buffer{Address: s.Address, gpu: g}).Free(), g.Pinner().Unregister(s.notes))
	}
	return errors.Join(append(errs, unix.Munmap(s.notes))...)
}

// divide lays out the host memory for one file: head, extents, sums.
func (s *DirectSlot) divide(head int64, extents int) {
	s.Head = s.notes[:head:head]
	s.Extents = unsafe.Slice((*Extent)(unsafe.Pointer(&s.notes[head])), extents)
	at := head + int64(extents)*int64(unsafe.Sizeof(Extent{}))
	s.Sums = unsafe.Slice((*uint64)(unsafe.Pointer(&s.notes[at])), extents)
}

// Release returns the slot. If an abandoned operation still uses it, it is returned when that ends.
func (s *DirectSlot) Release() {
	d := s.direct
	d.mu.Lock()
	defer d.mu.Unlock()
	hung := s.hung
	if hung == nil {
		d.free = append(d.free, s)
		d.out--
		return
	}
	d.hung++
	go func() {
		<-hung.Ended()
		d.mu.Lock()
		defer d.mu.Unlock()
		s.hung = nil
		d.hung--
		d.free = append(d.free, s)
		d.out--
	}()
}

// Slots returns the number of slots in use, and the bytes of all slots.
func (d *DirectRoute) Slots() (out int, bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.out, d.taken
}

// Trim frees the slots that are not in use.
func (d *DirectRoute) Trim() error {
	d.mu.Lock()
	free := d.free
	d.free = nil
	for _, s := range free {
		d.taken -= s.Bytes
	}
	d.mu.Unlock()
	var errs []error
	for _, s := range free {
		errs = append(errs, s.free())
	}
	return errors.Join(errs...)
}

// Close frees the slots. None may be in use, except by abandoned operations: those slots stay, and the error is an
// [ErrHung].
func (d *DirectRoute) Close() error {
	d.mu.Lock()
	d.closed = true
	out, hung := d.out, d.hung
	d.mu.Unlock()
	d.Handles.Close()
	var errs []error
	switch {
	case out > hung:
		errs = append(errs, fmt.Errorf("%w: %d slots are in use", ErrConfig, out))
	case hung > 0:
		errs = append(errs, fmt.Errorf("%w: %d slots are kept for operations that have not ended", ErrHung, hung))
	}
	return errors.Join(append(errs, d.Trim())...)
}

// Write writes the slot's bytes [from, to) to the same offsets of a file.
func (s *DirectSlot) Write(fd int, from, to int64) error {
	return s.file(fd, true, func(t *Thread, h *Handle) error { return s.move(t, h, true, from, to) })
}

// Read fills the slot with a file of the given size, and copies the first bytes of the slot to Head. If the file is
// shorter, the error is io.ErrUnexpectedEOF.
func (s *DirectSlot) Read(fd int, size int64) error {
	return s.file(fd, false, func(t *Thread, h *Handle) error {
		if err := s.move(t, h, false, 0, size); err != nil {
			return err
		}
		return t.Read(s.Head[:min(int64(len(s.Head)), size)], s.Address)
	})
}

func (s *DirectSlot) file(fd int, write bool, fn func(*Thread, *Handle) error) error {
	d := s.direct
	own, err := fd, error(nil)
	if d.cfg.Limit > 0 { // an abandoned operation may use the file after the caller has closed it
		if own, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3); err != nil {
			return fmt.Errorf("gds: descriptor for cuFile: %w", err)
		}
	}
	end := func() {
		if own != fd {
			unix.Close(own)
		}
	}
	ran, err := d.gpu.DoFileFor(d.cfg.Limit, func(t *Thread) error {
		defer end()
		h, err := d.Handles.Acquire(t, own, write)
		if err != nil {
			return err
		}
		defer h.Release(t)
		return fn(t, h)
	})
	if !ran {
		end()
	}
	errors.As(err, &s.hung)
	return err
}

func (s *DirectSlot) move(t *Thread, h *Handle, write bool, from, to int64) error {
	call := (*CuFile).Read
	if write {
		call = (*CuFile).Write
	}
	n, err := call(s.direct.cufile, t, h.handle, s.Address, to-from, from, from)
	switch {
	case err != nil:
		return err
	case n == to-from:
		return nil
	case write:
		return fmt.Errorf("%w: %d of %d bytes at %d were written", ErrShort, n, to-from, from)
	default:
		return fmt.Errorf("%w: %d of %d bytes at %d: %w", ErrShort, n, to-from, from, io.ErrUnexpectedEOF)
	}
}
