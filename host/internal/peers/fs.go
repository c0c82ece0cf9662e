package peers

import (
	"io"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/staging"
)

// Path is the prefix of the file names of an [FS].
const Path = "peers:"

// ownFiles is the size in bytes of the memory for the store's own files in this root, mostly namespaces. The memory is
// allocated on use.
const ownFiles = 64 << 20

// Capacity is the maximum number of bytes that can be borrowed at a time.
const Capacity = 1 << 40

// MostEntries is the maximum number of entries that can be borrowed at a time.
const MostEntries = 1 << 17

// FS is the file system of the root of borrowed entries. Pieces are read from their lenders, and the store's own files are in
// memory. Each ReadAt of a piece is one Fetch call or one series of NIXL reads.
type FS struct {
	*memfs.FS
	dev uint64

	mu     sync.RWMutex
	pieces map[string]*piece
	number uint64
}

func newFS() (*FS, error) {
	m, err := memfs.New(ownFiles, nil)
	if err != nil {
		return nil, err
	}
	return &FS{FS: m, dev: 1<<61 | 1, pieces: map[string]*piece{}}, nil
}

func (f *FS) piece(name string) *piece {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.pieces[name]
}

func (f *FS) add(name string, p *piece) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.number++
	p.ino = f.number
	f.pieces[name] = p
}

func pathError(op, name string, err error) error { return &fs.PathError{Op: op, Path: name, Err: err} }

// Device returns the same device number for all names. Without this method, [staging.OpenDirect] would look for the device of a
// real directory.
func (f *FS) Device(string) (uint64, error) { return f.dev, nil }

// OpenFile implements [staging.FS]. Opening a piece sends no message.
func (f *FS) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	p := f.piece(name)
	switch {
	case p == nil:
		return f.FS.OpenFile(name, flag, perm)
	case flag&unix.O_DIRECT != 0:
		return nil, pathError("open", name, unix.EINVAL)
	case flag&(os.O_WRONLY|os.O_RDWR) != 0:
		return nil, pathError("open", name, unix.EROFS)
	}
	return &file{name: name, piece: p, dev: f.dev}, nil
}

// Stat implements [staging.FS].
func (f *FS) Stat(name string) (staging.Info, error) {
	if p := f.piece(name); p != nil {
		return p.info(f.dev), nil
	}
	return f.FS.Stat(name)
}

// Remove implements [staging.FS]. Removing a piece only forgets it: the lender's file stays.
func (f *FS) Remove(name string) error {
	f.mu.Lock()
	_, is := f.pieces[name]
	delete(f.pieces, name)
	f.mu.Unlock()
	if is {
		return nil
	}
	return f.FS.Remove(name)
}

// Statfs implements [staging.FS]. It reports ample space, because borrowed pieces occupy no space here.
func (f *FS) Statfs(name string) (staging.Space, error) {
	s, err := f.FS.Statfs(name)
	s.Total, s.Free, s.Available = 2*Capacity, 2*Capacity, 2*Capacity
	return s, err
}

// file is an open piece.
type file struct {
	name  string
	piece *piece
	dev   uint64
	over  atomic.Bool
}

func (f *file) check(op string) error {
	if f.over.Load() {
		return pathError(op, f.name, fs.ErrClosed)
	}
	return nil
}

// ReadAt implements [staging.File].
func (f *file) ReadAt(p []byte, off int64) (int, error) {
	if err := f.check("read"); err != nil {
		return 0, err
	}
	left := f.piece.bytes - off
	switch {
	case off < 0:
		return 0, pathError("read", f.name, unix.EINVAL)
	case len(p) == 0:
		return 0, nil
	case left <= 0:
		return 0, io.EOF
	}
	want := p[:min(int64(len(p)), left)]
	if err := f.piece.read(want, off); err != nil {
		return 0, pathError("read", f.name, err)
	}
	if len(want) < len(p) {
		return len(want), io.EOF
	}
	return len(p), nil
}

// Stat implements [staging.File].
func (f *file) Stat() (staging.Info, error) { return f.piece.info(f.dev), f.check("stat") }

// Close implements [staging.File].
func (f *file) Close() error {
	if f.over.Swap(true) {
		return pathError("close", f.name, fs.ErrClosed)
	}
	return nil
}

// The following methods make a piece read-only.

func (f *file) WriteAt([]byte, int64) (int, error) { return 0, pathError("write", f.name, unix.EBADF) }
func (f *file) Allocate(int64) error               { return pathError("allocate", f.name, unix.EBADF) }
func (f *file) Datasync() error                    { return f.check("fdatasync") }
func (f *file) Direct() bool                       { return false }
func (f *file) Fd() uintptr                        { return staging.NoFd }
func (f *file) Name() string                       { return f.name }

// soundSize reports whether n is a possible size of a piece's file.
func soundSize(n uint64, class *catalog.Class) bool {
	return n > pageBytes && n%pageBytes == 0 && class != nil && n <= uint64(class.Bound())
}
