package gds

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// StorageMode says how a [FileIO] moves bytes.
type StorageMode int

// Modes.
const (
	Auto   StorageMode = iota // cuFile where it works; an operation that fails there is done again through host memory
	Direct                    // cuFile only: what fails there fails
	Staged                    // through page-locked host memory only
)

// Route is how one operation went.
type Route int

// Routes of an operation.
const (
	ByCuFile  Route = iota
	ByStaging       // through page-locked host memory
)

// FileIO writes device memory to files and reads it back, from and to any address that the GPU knows.
type FileIO struct {
	gpu    *GPU
	cufile *CuFile // nil: staged only
	mode   StorageMode
	slots  chan []byte // page-locked
	mem    []byte

	// Fallbacks counts operations that cuFile failed and staging did.
	Fallbacks atomic.Int64
}

const fileSlot = 4 << 20

// NewFileIO uses a GPU, and cuFile with its driver open unless it is nil. slots operations are staged at a time.
func NewFileIO(g *GPU, c *CuFile, mode StorageMode, slots int) (*FileIO, error) {
	if mode < Auto || mode > Staged || slots < 1 || slots > 1<<16 {
		return nil, fmt.Errorf("%w: storage mode %d, %d slots", ErrConfig, mode, slots)
	}
	if c == nil && mode == Direct {
		return nil, fmt.Errorf("%w: storage mode direct", ErrNoCuFile)
	}
	if mode == Staged {
		c = nil
	}
	mem, err := unix.Mmap(-1, 0, slots*fileSlot, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("gds: staging memory: %w", err)
	}
	if err := g.Pinner().Register(mem); err != nil {
		return nil, errors.Join(err, unix.Munmap(mem))
	}
	f := &FileIO{gpu: g, cufile: c, mode: mode, mem: mem, slots: make(chan []byte, slots)}
	for i := range slots {
		f.slots <- mem[i*fileSlot : (i+1)*fileSlot]
	}
	return f, nil
}

// Close gives the staging memory up. Files are to be closed before.
func (f *FileIO) Close() error {
	for range cap(f.slots) {
		<-f.slots
	}
	return errors.Join(f.gpu.Pinner().Unregister(f.mem), unix.Munmap(f.mem))
}

// DeviceFile is an open file.
type DeviceFile struct {
	io     *FileIO
	file   *os.File // through the page cache, for staging: it takes any offset and length
	direct *os.File // O_DIRECT and registered with cuFile; nil where that does not work
	handle uintptr
	why    error // why direct is nil
}

// Open opens a file. In mode Auto a file that cuFile does not take is staged; [DeviceFile.Direct] says so.
func (f *FileIO) Open(name string, flag int, perm os.FileMode) (*DeviceFile, error) {
	file, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	d := &DeviceFile{io: f, file: file}
	if f.cufile == nil {
		d.why = ErrNoCuFile
		return d, nil
	}
	if d.why = d.register(name, flag&^(os.O_CREATE|os.O_EXCL|os.O_TRUNC)); d.why != nil && f.mode == Direct {
		return nil, errors.Join(d.why, file.Close())
	}
	return d, nil
}

func (d *DeviceFile) register(name string, flag int) error {
	direct, err := os.OpenFile(name, flag|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	if e := d.io.gpu.Do(func(t *Thread) { d.handle, err = d.io.cufile.Register(t, int(direct.Fd())) }); e != nil {
		err = e
	}
	if err != nil {
		return errors.Join(err, direct.Close())
	}
	d.direct = direct
	return nil
}

// Direct says whether cuFile has the file, and if not why.
func (d *DeviceFile) Direct() (bool, error) { return d.direct != nil, d.why }

// Close closes the file. No operation may be under way.
func (d *DeviceFile) Close() error {
	var errs []error
	if d.direct != nil {
		errs = append(errs, d.io.gpu.Do(func(t *Thread) { d.io.cufile.Deregister(t, d.handle) }), d.direct.Close())
	}
	return errors.Join(append(errs, d.file.Close())...)
}

// Write writes size bytes of device memory at off, and says how.
func (d *DeviceFile) Write(address uint64, size, off int64) (Route, error) {
	return d.move(true, address, size, off)
}

// Read reads size bytes at off to device memory, and says how. A file that ends before fails with io.ErrUnexpectedEOF,
// and what the memory holds then is not to be used.
func (d *DeviceFile) Read(address uint64, size, off int64) (Route, error) {
	return d.move(false, address, size, off)
}

func (d *DeviceFile) move(write bool, address uint64, size, off int64) (Route, error) {
	if size < 0 || off < 0 {
		return ByStaging, fmt.Errorf("%w: %d bytes at %d", ErrConfig, size, off)
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

func (d *DeviceFile) byCuFile(write bool, address uint64, size, off int64) (err error) {
	lost := d.io.gpu.Do(func(t *Thread) {
		var n int64
		if write {
			n, err = d.io.cufile.Write(t, d.handle, address, size, off, 0)
		} else {
			n, err = d.io.cufile.Read(t, d.handle, address, size, off, 0)
		}
		if err == nil && n != size {
			err = fmt.Errorf("%w: %d of %d bytes at %d of %s", ErrShort, n, size, off, d.file.Name())
		}
	})
	return errors.Join(lost, err)
}

func (d *DeviceFile) byStaging(write bool, address uint64, size, off int64) error {
	slot := <-d.io.slots
	defer func() { d.io.slots <- slot }()
	for done := int64(0); done < size; {
		part := slot[:min(size-done, int64(len(slot)))]
		at := address + uint64(done)
		var err error
		copyPart := func(t *Thread) {
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
				return fmt.Errorf("gds: read %s: %w", d.file.Name(), err)
			}
			if lost := d.io.gpu.Do(copyPart); lost != nil || err != nil {
				return errors.Join(lost, err)
			}
		}
		done += int64(len(part))
	}
	return nil
}
