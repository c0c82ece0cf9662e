// Package fileio is the simple form of GPU storage: it moves any device memory to and from any file, by cuFile or through
// host memory.
package fileio

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/gds"
)

// Mode selects the routes of an [IO].
type Mode int

// Modes.
const (
	Auto   Mode = iota // cuFile if it works; a failed operation is repeated through host memory
	Direct             // cuFile only
	Staged             // through page-locked host memory only
)

// Route is the route of one operation.
type Route int

// Routes of an operation.
const (
	ByCuFile  Route = iota
	ByStaging       // through page-locked host memory
)

// IO writes device memory to files and reads it back, at any address of a GPU.
type IO struct {
	gpu    *gds.GPU
	cufile *gds.CuFile // nil: staged only
	mode   Mode
	slots  chan []byte // page-locked staging buffers
	mem    []byte

	// Fallbacks counts operations that failed in cuFile and were staged.
	Fallbacks atomic.Int64
}

const slotBytes = 4 << 20

// New makes an IO for a GPU. c is cuFile with its driver open, or nil. slots bounds the concurrent staged operations.
func New(g *gds.GPU, c *gds.CuFile, mode Mode, slots int) (*IO, error) {
	if mode < Auto || mode > Staged || slots < 1 || slots > 1<<16 {
		return nil, fmt.Errorf("%w: storage mode %d, %d slots", gds.ErrConfig, mode, slots)
	}
	if c == nil && mode == Direct {
		return nil, fmt.Errorf("%w: storage mode direct", gds.ErrNoCuFile)
	}
	if mode == Staged {
		c = nil
	}
	mem, err := unix.Mmap(-1, 0, slots*slotBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("fileio: staging memory: %w", err)
	}
	if err := g.Pinner().Register(mem); err != nil {
		return nil, errors.Join(err, unix.Munmap(mem))
	}
	f := &IO{gpu: g, cufile: c, mode: mode, mem: mem, slots: make(chan []byte, slots)}
	for i := range slots {
		f.slots <- mem[i*slotBytes : (i+1)*slotBytes]
	}
	return f, nil
}

// Close frees the staging memory. Close the files first.
func (f *IO) Close() error {
	for range cap(f.slots) {
		<-f.slots
	}
	return errors.Join(f.gpu.Pinner().Unregister(f.mem), unix.Munmap(f.mem))
}

// File is an open file.
type File struct {
	io     *IO
	file   *os.File // page-cached, for staging: any offset and length
	direct *os.File // O_DIRECT and registered with cuFile; nil if that failed
	handle uintptr
	why    error // why direct is nil
}

// Open opens a regular file. In mode Auto, a file that cuFile refuses is staged; [File.Direct] reports that.
func (f *IO) Open(name string, flag int, perm os.FileMode) (*File, error) {
	file, err := openRegular(name, flag, perm)
	if err != nil {
		return nil, err
	}
	d := &File{io: f, file: file}
	if f.cufile == nil {
		d.why = gds.ErrNoCuFile
		return d, nil
	}
	if d.why = d.register(flag); d.why != nil && f.mode == Direct {
		return nil, errors.Join(d.why, file.Close())
	}
	return d, nil
}

// openRegular opens a regular file. It does not block on a pipe or a device.
func openRegular(name string, flag int, perm os.FileMode) (*os.File, error) {
	file, err := os.OpenFile(name, flag&^os.O_TRUNC|unix.O_NONBLOCK|unix.O_NOCTTY, perm)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("fileio: %s is not a regular file: %w", name, unix.EINVAL)
	}
	if err == nil && flag&os.O_TRUNC != 0 {
		err = file.Truncate(0)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// reopen opens the same file for direct I/O, even if another file has its name now.
func reopen(file *os.File, flag int) (*os.File, error) {
	fd := fmt.Sprintf("/proc/self/fd/%d", file.Fd())
	return os.OpenFile(fd, flag&^(os.O_CREATE|os.O_EXCL|os.O_TRUNC)|unix.O_DIRECT, 0)
}

func (d *File) register(flag int) error {
	direct, err := reopen(d.file, flag)
	if err != nil {
		return err
	}
	if e := d.io.gpu.Do(func(t *gds.Thread) { d.handle, err = d.io.cufile.Register(t, int(direct.Fd())) }); e != nil {
		err = e
	}
	if err != nil {
		return errors.Join(err, direct.Close())
	}
	d.direct = direct
	return nil
}

// Direct reports whether cuFile has the file. If not, the error is the reason.
func (d *File) Direct() (bool, error) { return d.direct != nil, d.why }

// Close closes the file. No operation may be in progress.
func (d *File) Close() error {
	var errs []error
	if d.direct != nil {
		errs = append(errs, d.io.gpu.Do(func(t *gds.Thread) { d.io.cufile.Deregister(t, d.handle) }), d.direct.Close())
	}
	return errors.Join(append(errs, d.file.Close())...)
}

// Write writes size bytes of device memory to offset off of the file.
func (d *File) Write(address uint64, size, off int64) (Route, error) {
	return d.move(true, address, size, off)
}

// Read reads size bytes at offset off to device memory. A file that ends before is an io.ErrUnexpectedEOF, and leaves the
// memory undefined.
func (d *File) Read(address uint64, size, off int64) (Route, error) {
	return d.move(false, address, size, off)
}

func (d *File) move(write bool, address uint64, size, off int64) (Route, error) {
	if size < 0 || off < 0 {
		return ByStaging, fmt.Errorf("%w: %d bytes at %d", gds.ErrConfig, size, off)
	}
	if d.direct != nil {
		err := d.byCuFile(write, address, size, off)
		if err == nil || d.io.mode == Direct || d.io.gpu.Err() != nil {
			return ByCuFile, err
		}
		d.io.Fallbacks.Add(1)
	}
	return ByStaging, d.byStaging(write, address, size, off)
}

func (d *File) byCuFile(write bool, address uint64, size, off int64) (err error) {
	lost := d.io.gpu.Do(func(t *gds.Thread) {
		var n int64
		if write {
			n, err = d.io.cufile.Write(t, d.handle, address, size, off, 0)
		} else {
			n, err = d.io.cufile.Read(t, d.handle, address, size, off, 0)
		}
		if err == nil && n != size {
			err = fmt.Errorf("%w: %d of %d bytes at %d of %s", gds.ErrShort, n, size, off, d.file.Name())
		}
	})
	return errors.Join(lost, err)
}

func (d *File) byStaging(write bool, address uint64, size, off int64) error {
	slot := <-d.io.slots
	defer func() { d.io.slots <- slot }()
	for done := int64(0); done < size; {
		part := slot[:min(size-done, int64(len(slot)))]
		at := address + uint64(done)
		var err error
		copyPart := func(t *gds.Thread) {
			if write {
				err = t.Read(part, at)
			} else {
				err = t.Write(at, part)
			}
		}
		if write {
			if lost := d.io.gpu.Do(copyPart); lost != nil || err != nil {
				return errors.Join(lost, err)
			}
			if _, err := d.file.WriteAt(part, off+done); err != nil {
				return err
			}
		} else {
			if _, err := d.file.ReadAt(part, off+done); err != nil {
				if errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF
				}
				return fmt.Errorf("fileio: read %s: %w", d.file.Name(), err)
			}
			if lost := d.io.gpu.Do(copyPart); lost != nil || err != nil {
				return errors.Join(lost, err)
			}
		}
		done += int64(len(part))
	}
	return nil
}
