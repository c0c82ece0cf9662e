package faultfs

import (
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// faultFile is a file of an [FS]. Rules match the name that it was opened by.
type faultFile struct {
	staging.File
	fs *FS
}

// ReadAt implements [staging.File].
func (f *faultFile) ReadAt(p []byte, off int64) (int, error) {
	ft := f.fs.Take(staging.OpRead, f.Name(), "")
	switch {
	case ft.Errno != 0:
		return 0, f.failed(staging.OpRead, ft, func() error { _, err := f.File.ReadAt(p, off); return err })
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

// WriteAt implements [staging.File].
func (f *faultFile) WriteAt(p []byte, off int64) (int, error) {
	ft := f.fs.Take(staging.OpWrite, f.Name(), "")
	cut := ft.cut(len(p))
	switch {
	case ft.Errno != 0:
		return 0, f.failed(staging.OpWrite, ft, func() error { _, err := f.File.WriteAt(p, off); return err })
	case ft.Short:
		n, err := f.File.WriteAt(p[:f.aligned(cut)], off)
		if err == nil && n < len(p) {
			err = &fs.PathError{Op: "write", Path: f.Name(), Err: injected{io.ErrShortWrite}}
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

// tear writes all of p. The end that direct I/O cannot write, because it is not aligned, goes through the page cache.
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
		return n - n%staging.Align
	}
	return n
}

func (f *faultFile) failed(op staging.Op, ft Fault, do func() error) error {
	if ft.After {
		if err := do(); err != nil {
			return err
		}
	}
	if ft.Errno == unix.EINVAL && f.Direct() {
		err := &staging.AlignError{Op: op.String(), Path: f.Name(), Field: "kernel", Want: staging.Align, Err: unix.EINVAL}
		f.learn(err)
		return fmt.Errorf("%w: %w", ErrInjected, err)
	}
	return &fs.PathError{Op: op.String(), Path: f.Name(), Err: injected{ft.Errno}}
}

// learn records that a device refused an aligned direct transfer.
func (f *faultFile) learn(err error) {
	if e, ok := err.(*staging.AlignError); ok && e.Err != nil {
		if info, err := f.File.Stat(); err == nil {
			f.fs.modes.Set(info.Dev, false)
		}
	}
}

// Datasync implements [staging.File].
func (f *faultFile) Datasync() error { return f.fs.call(staging.OpSync, f.Name(), "", f.File.Datasync) }

// Allocate implements [staging.File].
func (f *faultFile) Allocate(n int64) error {
	return f.fs.call(staging.OpAllocate, f.Name(), "", func() error { return f.File.Allocate(n) })
}

// Shrink implements [staging.MemoryFile].
func (f *faultFile) Shrink(n int64) error { return staging.Shrink(f.File, n) }

// Memory implements [staging.MemoryFile]. To rules it is an allocation.
func (f *faultFile) Memory(n int64) (segments staging.Segments, err error) {
	err = f.fs.call(staging.OpAllocate, f.Name(), "", func() (err error) {
		segments, err = staging.MemoryOf(f.File, n)
		return err
	})
	if err != nil {
		return nil, err
	}
	return segments, nil
}

// Stat implements [staging.File].
func (f *faultFile) Stat() (staging.Info, error) {
	return answer(f.fs, staging.OpStat, f.Name(), func(string) (staging.Info, error) { return f.File.Stat() })
}

// Close implements [staging.File]. It closes the file also when a rule makes it fail, so no rule leaks a descriptor.
func (f *faultFile) Close() error {
	err := f.File.Close()
	if ferr := f.fs.call(staging.OpClose, f.Name(), "", func() error { return nil }); ferr != nil {
		return ferr
	}
	return err
}

// SetDirect implements [staging.DirectSetter].
func (f *faultFile) SetDirect(on bool) error {
	s, ok := f.File.(staging.DirectSetter)
	if !ok {
		return &fs.PathError{Op: "fcntl", Path: f.Name(), Err: unix.EINVAL}
	}
	if !on {
		return s.SetDirect(false)
	}
	return f.fs.call(staging.OpDirect, f.Name(), "", func() error { return s.SetDirect(true) })
}
