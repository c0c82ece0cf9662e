package staging

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// faultFile is known to the rules by the name that it was opened by.
type faultFile struct {
	File
	fs *FaultFS
}

// ReadAt implements [File].
func (f *faultFile) ReadAt(p []byte, off int64) (int, error) {
	ft := f.fs.strike(OpRead, f.Name(), "")
	switch {
	case ft.Errno != 0:
		return 0, f.failed(OpRead, ft, func() error { _, err := f.File.ReadAt(p, off); return err })
	case ft.Short:
		cut := f.aligned(ft.cut(len(p)))
		n, err := f.File.ReadAt(p[:cut], off)
		if err == nil && n < len(p) {
			err = io.EOF
		}
		return n, err
	}
	n, err := f.File.ReadAt(p, off)
	f.learn(err)
	if ft.Torn {
		clear(p[min(n, ft.cut(len(p))):n])
	}
	return n, err
}

// WriteAt implements [File].
func (f *faultFile) WriteAt(p []byte, off int64) (int, error) {
	ft := f.fs.strike(OpWrite, f.Name(), "")
	cut := ft.cut(len(p))
	switch {
	case ft.Errno != 0:
		return 0, f.failed(OpWrite, ft, func() error { _, err := f.File.WriteAt(p, off); return err })
	case ft.Short:
		n, err := f.File.WriteAt(p[:f.aligned(cut)], off)
		if err == nil && n < len(p) {
			err = pathError("write", f.Name(), injected{io.ErrShortWrite})
		}
		return n, err
	case ft.Torn:
		if err := f.tear(p[:cut], off); err != nil {
			return 0, err
		}
		return len(p), nil
	}
	n, err := f.File.WriteAt(p, off)
	f.learn(err)
	return n, err
}

// tear writes p to its last byte, also where direct I/O could only write it to a boundary.
func (f *faultFile) tear(p []byte, off int64) error {
	whole := f.aligned(len(p))
	if _, err := f.File.WriteAt(p[:whole], off); err != nil || whole == len(p) {
		return err
	}
	tail, err := f.fs.inner.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer tail.Close()
	_, err = tail.WriteAt(p[whole:], off+int64(whole))
	return err
}

func (f Fault) cut(n int) int {
	if f.Bytes < 0 {
		return n / 2
	}
	return int(min(f.Bytes, int64(n)))
}

func (f *faultFile) aligned(n int) int {
	if f.Direct() {
		return n - n%Align
	}
	return n
}

func (f *faultFile) failed(op Op, ft Fault, do func() error) error {
	if ft.After {
		if err := do(); err != nil {
			return err
		}
	}
	var err error = injected{ft.Errno}
	if ft.Errno == unix.EINVAL && f.Direct() {
		err = refusedDirect(op.String(), f.Name())
		f.learn(err)
		return fmt.Errorf("%w: %w", ErrInjected, err)
	}
	return pathError(op.String(), f.Name(), err)
}

// learn keeps what a transfer says about its device.
func (f *faultFile) learn(err error) {
	if e, ok := err.(*AlignError); ok && e.Err != nil {
		if info, err := f.File.Stat(); err == nil {
			f.fs.modes.set(info.Dev, false)
		}
	}
}

// Datasync implements [File].
func (f *faultFile) Datasync() error { return f.fs.call(OpSync, f.Name(), "", f.File.Datasync) }

// Allocate implements [File].
func (f *faultFile) Allocate(n int64) error {
	return f.fs.call(OpAllocate, f.Name(), "", func() error { return f.File.Allocate(n) })
}

// Stat implements [File].
func (f *faultFile) Stat() (Info, error) {
	return answer(f.fs, OpStat, f.Name(), func(string) (Info, error) { return f.File.Stat() })
}

// Close implements [File]. It closes also when it is told to fail: no rule leaks a descriptor.
func (f *faultFile) Close() error {
	err := f.File.Close()
	if ferr := f.fs.call(OpClose, f.Name(), "", func() error { return nil }); ferr != nil {
		return ferr
	}
	return err
}

func (f *faultFile) setDirect(on bool) error {
	s, ok := f.File.(directSetter)
	if !ok {
		return pathError("fcntl", f.Name(), unix.EINVAL)
	}
	if !on {
		return s.setDirect(false)
	}
	return f.fs.call(OpDirect, f.Name(), "", func() error { return s.setDirect(true) })
}
