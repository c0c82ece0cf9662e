package memfs

import (
	"fmt"
	"io"
	"io/fs"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// file is an open file. It implements [staging.MemoryFile].
type file struct {
	fs            *FS
	node          *node
	name          string
	reads, writes bool
	over          atomic.Bool  // set by Close
	users         atomic.Int64 // one for the open file, and one for each operation in progress
}

func (f *file) enter(op string) error {
	for n := f.users.Load(); n > 0 && !f.over.Load(); n = f.users.Load() {
		if f.users.CompareAndSwap(n, n+1) {
			return nil
		}
	}
	return f.fail(op, fs.ErrClosed)
}

func (f *file) leave() {
	if f.users.Add(-1) == 0 {
		f.fs.closed(f.node)
	}
}

func (f *file) fail(op string, err error) error { return pathError(op, f.name, err) }

func (f *file) Name() string { return f.name }

func (f *file) Direct() bool { return false }

func (f *file) Fd() uintptr { return staging.NoFd }

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	if err := f.enter("read"); err != nil {
		return 0, err
	}
	defer f.leave()
	if err := f.check("read", f.reads, off); err != nil {
		return 0, err
	}
	n, err := f.node.readAt(p, off)
	if err != nil && err != io.EOF {
		err = f.fail("read", err)
	}
	return n, err
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	if err := f.enter("write"); err != nil {
		return 0, err
	}
	defer f.leave()
	if err := f.check("write", f.writes, off); err != nil {
		return 0, err
	}
	if err := f.node.writeAt(f.fs.arena, p, off); err != nil {
		return 0, f.fail("write", err)
	}
	f.node.modified.Store(now())
	return len(p), nil
}

func (f *file) check(op string, allowed bool, off int64) error {
	switch {
	case !allowed:
		return f.fail(op, unix.EBADF)
	case off < 0:
		return f.fail(op, fmt.Errorf("offset %d: %w", off, unix.EINVAL))
	}
	return nil
}

// Memory implements [staging.MemoryFile].
func (f *file) Memory(n int64) (staging.Segments, error) {
	if err := f.enter("allocate"); err != nil {
		return nil, err
	}
	defer f.leave()
	segments, err := f.node.memory(f.fs.arena, n, f.writes)
	if err != nil {
		return nil, f.fail("allocate", err)
	}
	if f.writes {
		f.node.modified.Store(now())
	}
	return segments, nil
}

// Shrink implements [staging.MemoryFile].
func (f *file) Shrink(n int64) error {
	if err := f.enter("truncate"); err != nil {
		return err
	}
	defer f.leave()
	if err := f.check("truncate", f.writes, n); err != nil {
		return err
	}
	f.node.shrink(f.fs.arena, n)
	f.node.modified.Store(now())
	return nil
}

func (f *file) Allocate(n int64) error {
	if err := f.enter("allocate"); err != nil {
		return err
	}
	defer f.leave()
	if err := f.check("allocate", f.writes, n); err != nil {
		return err
	}
	if err := f.node.allocate(f.fs.arena, n); err != nil {
		return f.fail("allocate", err)
	}
	return nil
}

func (f *file) Datasync() error {
	if err := f.enter("fdatasync"); err != nil {
		return err
	}
	f.leave()
	return nil
}

func (f *file) Stat() (staging.Info, error) {
	if err := f.enter("stat"); err != nil {
		return staging.Info{}, err
	}
	defer f.leave()
	f.fs.mu.RLock()
	defer f.fs.mu.RUnlock()
	return f.node.info(f.fs.dev), nil
}

// Close implements [staging.File]. The reference to the file's memory ends with the last operation in progress.
func (f *file) Close() error {
	if f.over.Swap(true) {
		return f.fail("close", fs.ErrClosed)
	}
	f.leave()
	return nil
}
