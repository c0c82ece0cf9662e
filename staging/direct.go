package staging

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// AlignError names the argument of direct I/O that was not a multiple of [Align]. Field "kernel" means that all were
// aligned and the kernel refused them. It is [ErrAlign].
type AlignError struct {
	Op, Path string
	Field    string // address, length, offset or kernel
	Value    uint64
	Want     int
	Err      error // the kernel's error; nil if the kernel was not called
}

func (e *AlignError) Error() string {
	if e.Field == "kernel" {
		return fmt.Sprintf("%s %s: refused (%v) although aligned to %d: the file system or device wants more, or takes "+
			"no direct I/O after all; files opened there from now on use the page cache", e.Op, e.Path, e.Err, e.Want)
	}
	return fmt.Sprintf("%s %s: %s %#x is not a multiple of %d, which direct I/O needs", e.Op, e.Path, e.Field, e.Value,
		e.Want)
}

// Unwrap returns [ErrAlign] and the errno.
func (e *AlignError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrAlign}
	}
	return []error{ErrAlign, e.Err}
}

func refusedDirect(op, path string) error {
	return &AlignError{Op: op, Path: path, Field: "kernel", Want: Align, Err: unix.EINVAL}
}

var errNegative = errors.New("negative offset")

// checkTransfer checks alignment, so that EINVAL from the kernel can only mean that it does not support the transfer.
func checkTransfer(op, path string, p []byte, off int64, direct bool) error {
	if off < 0 {
		return &fs.PathError{Op: op, Path: path, Err: errNegative}
	}
	addr := uint64(address(p))
	if !direct || len(p) == 0 || (addr|uint64(len(p))|uint64(off))%Align == 0 {
		return nil
	}
	e := &AlignError{Op: op, Path: path, Want: Align}
	switch {
	case addr%Align != 0:
		e.Field, e.Value = "address", addr
	case len(p)%Align != 0:
		e.Field, e.Value = "length", uint64(len(p))
	default:
		e.Field, e.Value = "offset", uint64(off)
	}
	return e
}

// DirectModes records by device whether direct I/O works. The zero value has no device.
type DirectModes struct {
	never bool // direct I/O is off for all devices

	mu   sync.RWMutex
	took map[uint64]bool
}

// osModes is the record of the operating system's FS.
var osModes DirectModes

func (m *DirectModes) get(dev uint64) (took, known bool) {
	if m.never {
		return false, true
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	took, known = m.took[dev]
	return took, known
}

// Set records whether direct I/O works on a device.
func (m *DirectModes) Set(dev uint64, took bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.took == nil {
		m.took = map[uint64]bool{}
	}
	m.took[dev] = took
}

// DirectModer is an [FS] with a [DirectModes] of its own. All others share one.
type DirectModer interface{ DirectModes() *DirectModes }

func directModesOf(fsys FS) *DirectModes {
	if d, ok := fsys.(DirectModer); ok {
		return d.DirectModes()
	}
	return &osModes
}

// Buffered returns fsys without direct I/O: OpenDirect opens through the page cache.
func Buffered(fsys FS) FS { return bufferedFS{FS: fsys, known: &DirectModes{never: true}} }

type bufferedFS struct {
	FS
	known *DirectModes
}

// DirectModes implements [DirectModer].
func (b bufferedFS) DirectModes() *DirectModes { return b.known }

// Device implements [placed].
func (b bufferedFS) Device(name string) (uint64, error) { return deviceOf(b.FS, name) }

// DirectSetter is a [File] that can switch O_DIRECT while it is open.
type DirectSetter interface{ SetDirect(on bool) error }

// DirectModes implements [DirectModer].
func (osFS) DirectModes() *DirectModes { return &osModes }

// placed is an [FS] that knows the device of a name without a system call.
type placed interface {
	Device(name string) (uint64, error)
}

func deviceOf(fsys FS, name string) (uint64, error) {
	if p, ok := fsys.(placed); ok {
		return p.Device(name)
	}
	info, err := fsys.Stat(name)
	return info.Dev, err
}

// OpenDirect opens a file with O_DIRECT if its device supports that, and through the page cache otherwise;
// [File.Direct] tells which. The first file that is opened on a device is used as a test, and the result is recorded.
// If the device refuses an aligned transfer later, its files are opened buffered from then on.
func OpenDirect(fsys FS, name string, flag int, perm fs.FileMode) (File, error) {
	if w, ok := fsys.(*WatchedFS); ok {
		return w.openDirect(name, flag, perm)
	}
	known := directModesOf(fsys)
	dev, err := deviceOf(fsys, filepath.Dir(name))
	if err != nil {
		return nil, err
	}
	took, ok := known.get(dev)
	if took {
		f, err := fsys.OpenFile(name, flag|unix.O_DIRECT, perm)
		if !errors.Is(err, unix.EINVAL) {
			return f, err
		}
		known.Set(dev, false)
	}
	// A refused create with O_DIRECT leaves an empty file behind, so the first file of a device is opened without it
	// and switched.
	f, err := fsys.OpenFile(name, flag, perm)
	if err != nil || ok {
		return f, err
	}
	s, ok := f.(DirectSetter)
	if !ok {
		return f, nil
	}
	took = tryDirect(f, s, flag)
	known.Set(dev, took)
	if !took && f.Direct() {
		if err := s.SetDirect(false); err != nil {
			f.Close()
			return nil, err
		}
	}
	return f, nil
}

// tryDirect switches f to direct I/O and tries it: with a write if the file was just made, else with a read. It uses
// the descriptor, so that a fault rule does not count it as one of the caller's transfers.
func tryDirect(f File, s DirectSetter, flag int) bool {
	var on unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &on) == nil && (on.Type == unix.TMPFS_MAGIC || on.Type == unix.RAMFS_MAGIC) {
		return false // the file system accepts O_DIRECT, but its files are the page cache
	}
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		if st.Dio_offset_align == 0 || st.Dio_offset_align > Align || st.Dio_mem_align > Align {
			return false
		}
	}
	if s.SetDirect(true) != nil {
		return false
	}
	page, err := unix.Mmap(-1, 0, Align, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return true // no memory for the test: the first transfer decides
	}
	defer unix.Munmap(page)
	const made = os.O_CREATE | os.O_EXCL
	if flag&made == made && flag&(os.O_WRONLY|os.O_RDWR) != 0 {
		err = retry(func() error { _, err := unix.Pwrite(int(f.Fd()), page, 0); return err })
		if unix.Ftruncate(int(f.Fd()), 0) != nil {
			return false
		}
	} else {
		err = retry(func() error { _, err := unix.Pread(int(f.Fd()), page, 0); return err })
	}
	return err != unix.EINVAL && err != unix.EOPNOTSUPP
}
