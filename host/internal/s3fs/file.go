package s3fs

import (
	"fmt"
	"io"
	"io/fs"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// content is the content of a file: an [upload] or an [object].
type content interface {
	stat() staging.Info
	readAt(p []byte, off int64) (int, error) // off must be within the size
	writeAt(p []byte, off int64) error
	closed()
}

// file is an open file.
type file struct {
	content
	name   string
	writes bool
	over   atomic.Bool
}

func (f *file) check(op string, allowed bool, off int64) error {
	switch {
	case f.over.Load():
		return pathError(op, f.name, fs.ErrClosed)
	case !allowed:
		return pathError(op, f.name, unix.EBADF)
	case off < 0:
		return pathError(op, f.name, fmt.Errorf("offset %d: %w", off, unix.EINVAL))
	}
	return nil
}

func (f *file) Name() string { return f.name }

func (f *file) Direct() bool { return false }

func (f *file) Fd() uintptr { return staging.NoFd }

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	if err := f.check("read", true, off); err != nil || len(p) == 0 {
		return 0, err
	}
	left := f.stat().Size - off
	if left <= 0 {
		return 0, io.EOF
	}
	n, err := f.readAt(p[:min(int64(len(p)), left)], off)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, failed("read", f.name, err, false)
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	err := f.check("write", f.writes, off)
	if err == nil && len(p) > 0 {
		err = failed("write", f.name, f.writeAt(p, off), true)
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// Datasync implements [staging.File]. It does nothing: before its publication a file need not be durable, and afterwards it is.
func (f *file) Datasync() error { return f.check("fdatasync", true, 0) }

func (f *file) Stat() (staging.Info, error) {
	if err := f.check("stat", true, 0); err != nil {
		return staging.Info{}, err
	}
	return f.stat(), nil
}

// Allocate implements [staging.File]. It does nothing, because a bucket has no space to reserve.
func (f *file) Allocate(int64) error { return f.check("allocate", true, 0) }

func (f *file) Close() error {
	if f.over.Swap(true) {
		return pathError("close", f.name, fs.ErrClosed)
	}
	f.closed()
	return nil
}
