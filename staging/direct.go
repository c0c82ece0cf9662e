package staging

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// AlignError says which argument of direct I/O was not a multiple of [Align], or, as "kernel", that the kernel refused
// arguments that all were. It is [ErrAlign].
type AlignError struct {
	Op, Path string
	Field    string // address, length, offset or kernel
	Value    uint64
	Want     int
	Err      error // what the kernel said, if it was asked
}

func (e *AlignError) Error() string {
	if e.Field == "kernel" {
		return fmt.Sprintf("%s %s: refused by the kernel although aligned to %d: %v; the file system or device wants "+
			"more, or takes no direct I/O here; files opened from now on use the page cache", e.Op, e.Path, e.Want, e.Err)
	}
	return fmt.Sprintf("%s %s: %s %#x is not a multiple of %d, which direct I/O needs", e.Op, e.Path, e.Field, e.Value, e.Want)
}

// Unwrap makes it [ErrAlign] and the errno.
func (e *AlignError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrAlign}
	}
	return []error{ErrAlign, e.Err}
}

func checkAligned(op, path string, p []byte, off int64) error {
	if (uint64(address(p))|uint64(len(p))|uint64(off))&(Align-1) == 0 {
		return nil
	}
	e := &AlignError{Op: op, Path: path, Want: Align}
	switch {
	case address(p)%Align != 0:
		e.Field, e.Value = "address", uint64(address(p))
	case len(p)%Align != 0:
		e.Field, e.Value = "length", uint64(len(p))
	default:
		e.Field, e.Value = "offset", uint64(off)
	}
	return e
}

// directModes remembers, per device, whether direct I/O works there.
var directModes modes

type modes struct {
	mu sync.RWMutex
	ok map[uint64]bool
}

func (m *modes) get(dev uint64) (ok, known bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	ok, known = m.ok[dev]
	return ok, known
}

func (m *modes) set(dev uint64, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ok == nil {
		m.ok = map[uint64]bool{}
	}
	m.ok[dev] = ok
}

func (m *modes) refuse(dev uint64) { m.set(dev, false) }

// directSetter is a File whose O_DIRECT can be switched while open.
type directSetter interface{ setDirect(on bool) error }

// OpenDirect opens a file past the page cache if its device takes that, and through it otherwise; [File.Direct] says
// which. What a device takes is found out with the first file opened there, and remembered for the process.
func OpenDirect(fsys FS, name string, flag int, perm fs.FileMode) (File, error) {
	dir, err := fsys.Stat(filepath.Dir(name))
	if err != nil {
		return nil, err
	}
	switch ok, known := directModes.get(dir.Dev); {
	case known && ok:
		return fsys.OpenFile(name, flag|unix.O_DIRECT, perm)
	case known:
		return fsys.OpenFile(name, flag, perm)
	}
	// A create with O_DIRECT that is refused leaves the empty file behind, so the first one here is opened plain and
	// switched.
	f, err := fsys.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	s, ok := f.(directSetter)
	if !ok {
		return f, nil
	}
	created := flag&(os.O_CREATE|os.O_EXCL) == os.O_CREATE|os.O_EXCL && flag&(os.O_WRONLY|os.O_RDWR) != 0
	took := tryDirect(f, s, created)
	directModes.set(dir.Dev, took)
	if !took && f.Direct() {
		if err := s.setDirect(false); err != nil {
			f.Close()
			return nil, err
		}
	}
	return f, nil
}

// tryDirect switches f to direct I/O and tries it for real: a write into a file that was just made, else a read.
func tryDirect(f File, s directSetter, created bool) bool {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		if st.Dio_offset_align == 0 || st.Dio_offset_align > Align || st.Dio_mem_align > Align {
			return false
		}
	}
	if s.setDirect(true) != nil {
		return false
	}
	page, err := unix.Mmap(-1, 0, Align, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return true // no memory to try with: the first transfer will tell
	}
	defer unix.Munmap(page)
	if !created {
		_, err := unix.Pread(int(f.Fd()), page, 0)
		return err != unix.EINVAL && err != unix.EOPNOTSUPP
	}
	_, err = unix.Pwrite(int(f.Fd()), page, 0)
	if unix.Ftruncate(int(f.Fd()), 0) != nil {
		return false
	}
	return err != unix.EINVAL && err != unix.EOPNOTSUPP
}
