package staging

import (
	"io"
	"io/fs"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// osFile is a descriptor with a count of its users. Close does not wait for a slow ReadAt, and the kernel cannot reuse
// the number before that ReadAt returns.
type osFile struct {
	name   string
	fd     int
	direct atomic.Bool
	closed atomic.Bool
	users  atomic.Int64 // 1 while open, and 1 for each operation in progress
}

func newOSFile(fd int, name string, direct bool) *osFile {
	f := &osFile{name: name, fd: fd}
	f.direct.Store(direct)
	f.users.Store(1)
	return f
}

func (f *osFile) enter() bool {
	if f.closed.Load() {
		return false
	}
	for {
		n := f.users.Load()
		if n == 0 {
			return false
		}
		if f.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (f *osFile) leave() error {
	if f.users.Add(-1) == 0 {
		return unix.Close(f.fd) // not retried: after EINTR the descriptor is gone on Linux
	}
	return nil
}

func (f *osFile) fail(op string, err error) error {
	return &fs.PathError{Op: op, Path: f.name, Err: err}
}

func (f *osFile) Name() string { return f.name }

func (f *osFile) Direct() bool { return f.direct.Load() }

func (f *osFile) Fd() uintptr { return uintptr(f.fd) }

func (f *osFile) ReadAt(p []byte, off int64) (int, error) {
	if !f.enter() {
		return 0, f.fail("read", fs.ErrClosed)
	}
	defer f.leave()
	direct := f.direct.Load()
	if err := checkTransfer("read", f.name, p, off, direct); err != nil {
		return 0, err
	}
	n, err := readFull(func(p []byte, off int64) (int, error) { return unix.Pread(f.fd, p, off) }, p, off, direct)
	if err == nil || err == io.EOF {
		return n, err
	}
	return n, f.classify("read", direct, err)
}

func (f *osFile) WriteAt(p []byte, off int64) (int, error) {
	if !f.enter() {
		return 0, f.fail("write", fs.ErrClosed)
	}
	defer f.leave()
	direct := f.direct.Load()
	if err := checkTransfer("write", f.name, p, off, direct); err != nil {
		return 0, err
	}
	n, err := writeFull(func(p []byte, off int64) (int, error) { return unix.Pwrite(f.fd, p, off) }, p, off, direct)
	if err != nil {
		return n, f.classify("write", direct, err)
	}
	return n, nil
}

// classify interprets EINVAL on a direct file. The arguments were checked before.
func (f *osFile) classify(op string, direct bool, err error) error {
	if !direct || err != unix.EINVAL {
		return f.fail(op, err)
	}
	var st unix.Stat_t
	if unix.Fstat(f.fd, &st) == nil {
		osModes.Set(uint64(st.Dev), false)
	}
	return refusedDirect(op, f.name)
}

func (f *osFile) Datasync() error {
	if !f.enter() {
		return f.fail("fdatasync", fs.ErrClosed)
	}
	defer f.leave()
	if err := retry(func() error { return unix.Fdatasync(f.fd) }); err != nil {
		return f.fail("fdatasync", err)
	}
	return nil
}

func (f *osFile) Stat() (Info, error) {
	if !f.enter() {
		return Info{}, f.fail("stat", fs.ErrClosed)
	}
	defer f.leave()
	var st unix.Stat_t
	if err := retry(func() error { return unix.Fstat(f.fd, &st) }); err != nil {
		return Info{}, f.fail("stat", err)
	}
	return infoOf(&st), nil
}

func (f *osFile) Allocate(n int64) error {
	if !f.enter() {
		return f.fail("fallocate", fs.ErrClosed)
	}
	defer f.leave()
	switch err := retry(func() error { return unix.Fallocate(f.fd, 0, 0, n) }); err {
	case nil, unix.EOPNOTSUPP, unix.ENOSYS:
		return nil
	default:
		return f.fail("fallocate", err)
	}
}

// Close implements [File]. The descriptor is closed when the last operation in progress returns.
func (f *osFile) Close() error {
	if f.closed.Swap(true) {
		return f.fail("close", fs.ErrClosed)
	}
	if err := f.leave(); err != nil {
		return f.fail("close", err)
	}
	return nil
}

// SetDirect implements [DirectSetter]. It fails with EINVAL if the file system has no direct I/O.
func (f *osFile) SetDirect(on bool) error {
	if !f.enter() {
		return f.fail("fcntl", fs.ErrClosed)
	}
	defer f.leave()
	flags, err := unix.FcntlInt(uintptr(f.fd), unix.F_GETFL, 0)
	if err != nil {
		return f.fail("fcntl", err)
	}
	if on {
		flags |= unix.O_DIRECT
	} else {
		flags &^= unix.O_DIRECT
	}
	if _, err := unix.FcntlInt(uintptr(f.fd), unix.F_SETFL, flags); err != nil {
		return f.fail("fcntl", err)
	}
	f.direct.Store(on)
	return nil
}

// readFull reads until p is full, the file ends or a call fails. A direct read that stops between boundaries is resumed
// at the boundary before, because an unaligned read would be refused. A read that stops within its first page is at the
// end of the file.
func readFull(pread func([]byte, int64) (int, error), p []byte, off int64, direct bool) (int, error) {
	n := 0
	for n < len(p) {
		m, err := pread(p[n:], off+int64(n))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return n, err
		case m == 0:
			return n, io.EOF
		}
		if direct && m%Align != 0 && n+m < len(p) {
			if m < Align {
				return n + m, io.EOF
			}
			m -= m % Align
		}
		n += m
	}
	return n, nil
}

// writeFull writes until p is written or a call fails. A direct write that stops between boundaries is resumed at the
// boundary before. A write without progress in two calls is short.
func writeFull(pwrite func([]byte, int64) (int, error), p []byte, off int64, direct bool) (int, error) {
	n, stuck := 0, false
	for n < len(p) {
		m, err := pwrite(p[n:], off+int64(n))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return n, err
		}
		if direct && n+m < len(p) {
			m -= m % Align
		}
		if m == 0 && stuck {
			return n, io.ErrShortWrite
		}
		stuck = m == 0 // on a second attempt a full disk reports ENOSPC
		n += m
	}
	return n, nil
}

func retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

func address(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }
