package sim

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/staging"
)

// sizes is the file system of a simulated root. It keeps names, sizes, and of the bytes those that are not zero: the heads of
// pieces. It has room for all.
type sizes struct {
	mu      sync.Mutex
	files   map[string]*sized
	removed func(name string) // called for each file that is removed
}

// sized is a file, or a directory.
type sized struct {
	info  staging.Info
	pages [][]byte // without the zeros at their ends
}

func (f *sizes) Stat(name string) (staging.Info, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.files[name]; n != nil {
		return n.info, nil
	}
	return staging.Info{}, &fs.PathError{Op: "stat", Path: name, Err: fs.ErrNotExist}
}

// add makes a file or a directory. It returns the one with the name if there is one.
func (f *sizes) add(name string, mode fs.FileMode) (n *sized, made bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n = f.files[name]; n == nil {
		n, made = &sized{info: staging.Info{Ino: uint64(len(f.files)), Links: 1, Mode: mode}}, true
		f.files[name] = n
	}
	return n, made
}

func (f *sizes) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	if _, err := f.Stat(name); err != nil && flag&os.O_CREATE == 0 {
		return nil, err
	}
	n, made := f.add(name, perm)
	if !made && flag&os.O_EXCL != 0 {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrExist}
	}
	o := &openSized{sized: n, name: name, bytes: make([]byte, n.info.Allocated)}
	for i, page := range n.pages {
		copy(o.bytes[i*staging.Align:], page)
	}
	return o, nil
}

func (f *sizes) Rename(oldname, newname string) error {
	if _, err := f.Stat(oldname); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.files[newname] = f.files[oldname]
	delete(f.files, oldname)
	return nil
}

func (f *sizes) RenameNoReplace(oldname, newname string) error {
	if _, err := f.Stat(newname); err == nil {
		return &fs.PathError{Op: "rename", Path: newname, Err: fs.ErrExist}
	}
	return f.Rename(oldname, newname)
}

func (f *sizes) Remove(name string) error {
	if _, err := f.Stat(name); err != nil {
		return err
	}
	f.removed(name)
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.files, name)
	return nil
}

func (f *sizes) Mkdir(name string, perm fs.FileMode) error { return f.MkdirAll(name, perm) }

func (f *sizes) MkdirAll(name string, perm fs.FileMode) error {
	for ; len(name) > 1; name = filepath.Dir(name) {
		f.add(name, fs.ModeDir|perm)
	}
	return nil
}

// Link implements [staging.FS]. A file has one name.
func (f *sizes) Link(string, string) error { return errors.ErrUnsupported }

// ReadDir implements [staging.FS]. A store reads directories when it opens its roots, and these are new.
func (f *sizes) ReadDir(string) ([]fs.DirEntry, error) { return nil, nil }

func (f *sizes) Statfs(string) (staging.Space, error) {
	return staging.Space{Total: 1 << 60, Free: 1 << 60, Available: 1 << 60}, nil
}

func (f *sizes) SyncDir(string) error { return nil }
func (f *sizes) SyncFS(string) error  { return nil }

// Lock implements [staging.FS]. Nothing else can have the lock.
func (f *sizes) Lock(name string) (io.Closer, error) { return f.OpenFile(name, os.O_CREATE, 0o600) }

// openSized is an open file with bytes. It offers the bytes as memory, as files of a root in memory do, so that loads copy pieces
// into them.
type openSized struct {
	*sized
	name  string
	bytes []byte // whole pages
	wrote bool
}

func (o *openSized) ReadAt(p []byte, off int64) (n int, err error) {
	if n = copy(p, o.bytes[min(off, o.info.Size):o.info.Size]); n < len(p) {
		err = io.EOF
	}
	return n, err
}

func (o *openSized) WriteAt(p []byte, off int64) (int, error) {
	_, err := o.Memory(off + int64(len(p)))
	return copy(o.bytes[off:], p), err
}

func (o *openSized) Memory(n int64) (staging.Segments, error) {
	if o.wrote = true; n > o.info.Size {
		o.info.Size, o.info.Allocated = n, (n+staging.Align-1)&^(staging.Align-1)
		o.bytes = append(o.bytes, make([]byte, o.info.Allocated-int64(len(o.bytes)))...)
	}
	return staging.Segments{o.bytes}, nil
}

func (o *openSized) Close() error {
	if o.wrote {
		o.pages = o.pages[:0]
		for page := range slices.Chunk(o.bytes, staging.Align) {
			o.pages = append(o.pages, bytes.Clone(bytes.TrimRight(page, "\x00")))
		}
	}
	return nil
}

func (o *openSized) Allocate(n int64) (err error) { _, err = o.Memory(n); return err }
func (o *openSized) Stat() (staging.Info, error)  { return o.info, nil }
func (o *openSized) Shrink(int64) error           { return nil }
func (o *openSized) Datasync() error              { return nil }
func (o *openSized) Name() string                 { return o.name }
func (o *openSized) Direct() bool                 { return false }
func (o *openSized) Fd() uintptr                  { return staging.NoFd }
