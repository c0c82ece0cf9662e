package staging

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// VolatileFS is an [FS] over another whose machine can lose its power: [VolatileFS.PowerLoss] turns the directories back
// into something that a crash might have left. What was synced stays. Of what was not, any page of a file may be lost,
// also when later ones stayed, and a file's new length; of the changes of names in one directory the last ones, of each
// directory as many as chance has it. So it forgets more than any one file system would: a name can survive without its
// bytes, bytes without their name, and a synced file is lost with its unsynced name.
//
// It remembers what it would have to bring back: the old content of pages that are overwritten, and the files of names
// that are removed, by links in a directory of its own. They take space until the change is synced. Directories must not
// be renamed, and files of other users must not change meanwhile.
type VolatileFS struct {
	inner FS
	grave string
	modes modes

	mu    sync.Mutex
	down  bool
	seq   uint64
	files map[fileID]*keptFile
	names []*nameChange // not durable, oldest first
	locks map[io.Closer]struct{}
}

type fileID struct{ dev, ino uint64 }

// keptFile is a file whose state on disk may differ from what is read.
type keptFile struct {
	link  string           // its name in the grave
	refs  int              // open files that may write, and names that may come back
	size  int64            // durable
	pages map[int64][]byte // durable content of pages written since; nil where it ended before them
}

// nameChange is one that is lost or stays as a whole.
type nameChange struct {
	dirs    []string
	durable bool
	undo    func() error
	kept    *keptFile // whose name it took away, or nil
}

// Volatile puts a machine under an FS. The grave is a directory of its own on the same file system: made if missing, and
// emptied.
func Volatile(inner FS, grave string) (*VolatileFS, error) {
	if err := os.RemoveAll(grave); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(grave, 0o700); err != nil {
		return nil, err
	}
	return &VolatileFS{inner: inner, grave: grave, files: map[fileID]*keptFile{}, locks: map[io.Closer]struct{}{}}, nil
}

func (v *VolatileFS) directModes() *modes { return &v.modes }

// begin takes the lock; the caller gives it back also after an error.
func (v *VolatileFS) begin(op Op, name string) error {
	v.mu.Lock()
	if v.down {
		return pathError(op.String(), name, injected{ErrPowerLost})
	}
	return nil
}

func (v *VolatileFS) buryName() string {
	v.seq++
	return filepath.Join(v.grave, strconv.FormatUint(v.seq, 10))
}

// keep makes sure that the file at name can be brought back, and takes a reference.
func (v *VolatileFS) keep(name string) (*keptFile, error) {
	info, err := v.inner.Stat(name)
	if err != nil {
		return nil, err
	}
	id := fileID{info.Dev, info.Ino}
	k := v.files[id]
	if k == nil {
		k = &keptFile{link: v.buryName(), size: info.Size, pages: map[int64][]byte{}}
		if err := v.inner.Link(name, k.link); err != nil {
			return nil, err
		}
		v.files[id] = k
	}
	k.refs++
	return k, nil
}

// drop gives a reference back. A file that is as durable as it will be, or that has no name any more, is forgotten.
func (v *VolatileFS) drop(k *keptFile) error {
	if k.refs--; k.refs > 0 {
		return nil
	}
	info, err := v.inner.Stat(k.link)
	if err != nil {
		return err
	}
	if info.Links > 1 && !(len(k.pages) == 0 && k.size == info.Size) {
		return nil
	}
	delete(v.files, fileID{info.Dev, info.Ino})
	return v.inner.Remove(k.link)
}

// synced says that a file's bytes are durable now.
func (k *keptFile) synced(size int64) {
	clear(k.pages)
	k.size = size
}

// before remembers the durable content of the pages of [off, off+n).
func (v *VolatileFS) before(k *keptFile, off, n int64) error {
	var f File
	defer func() {
		if f != nil {
			f.Close()
		}
	}()
	for page := off / Align; page*Align < off+n; page++ {
		if _, known := k.pages[page]; known {
			continue
		}
		if page*Align >= k.size {
			k.pages[page] = nil
			continue
		}
		if f == nil {
			var err error
			if f, err = v.inner.OpenFile(k.link, os.O_RDONLY, 0); err != nil {
				return err
			}
		}
		old := make([]byte, min(Align, k.size-page*Align))
		if _, err := f.ReadAt(old, page*Align); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		k.pages[page] = old
	}
	return nil
}

// OpenFile implements [FS].
func (v *VolatileFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	err := v.begin(OpOpen, name)
	defer v.mu.Unlock()
	if err != nil {
		return nil, err
	}
	_, missing := v.inner.Stat(name)
	f, err := v.inner.OpenFile(name, flag&^os.O_TRUNC, perm)
	if err != nil {
		return nil, err
	}
	if missing != nil {
		v.changed(nil, func() error { return v.inner.Remove(name) }, filepath.Dir(name))
	}
	out := &volatileFile{File: f, fs: v}
	if info, err := f.Stat(); err == nil && !info.IsDir() && flag&(os.O_WRONLY|os.O_RDWR) != 0 {
		if out.kept, err = v.keep(name); err == nil && missing != nil {
			out.kept.size = 0
		}
		if err == nil && flag&os.O_TRUNC != 0 {
			if err = v.before(out.kept, 0, info.Size); err == nil {
				err = unix.Ftruncate(int(f.Fd()), 0)
			}
		}
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
	}
	return out, nil
}

// ReadDir implements [FS].
func (v *VolatileFS) ReadDir(name string) ([]fs.DirEntry, error) {
	return ask(v, OpReadDir, name, v.inner.ReadDir)
}

// Stat implements [FS].
func (v *VolatileFS) Stat(name string) (Info, error) {
	return ask(v, OpStat, name, func(name string) (Info, error) {
		info, err := v.inner.Stat(name)
		return v.visible(info), err
	})
}

// visible hides the link in the grave.
func (v *VolatileFS) visible(info Info) Info {
	if v.files[fileID{info.Dev, info.Ino}] != nil && info.Links > 0 {
		info.Links--
	}
	return info
}

// Statfs implements [FS].
func (v *VolatileFS) Statfs(name string) (Space, error) {
	return ask(v, OpStatfs, name, v.inner.Statfs)
}

func ask[T any](v *VolatileFS, op Op, name string, do func(string) (T, error)) (told T, err error) {
	err = v.begin(op, name)
	defer v.mu.Unlock()
	if err != nil {
		return told, err
	}
	return do(name)
}

// SyncFS implements [FS].
func (v *VolatileFS) SyncFS(name string) error {
	err := v.begin(OpSyncFS, name)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	if err := v.inner.SyncFS(name); err != nil {
		return err
	}
	for _, c := range v.names {
		c.durable = true
	}
	for _, k := range v.files {
		info, err := v.inner.Stat(k.link)
		if err != nil {
			return err
		}
		k.synced(info.Size)
		k.refs++
		if err := v.drop(k); err != nil {
			return err
		}
	}
	return v.settle()
}

// Lock implements [FS].
func (v *VolatileFS) Lock(name string) (io.Closer, error) {
	err := v.begin(OpLock, name)
	defer v.mu.Unlock()
	if err != nil {
		return nil, err
	}
	inner, err := v.inner.Lock(name)
	if err != nil {
		return nil, err
	}
	l := &volatileLock{fs: v, Closer: inner}
	v.locks[l] = struct{}{}
	return l, nil
}

// volatileLock ends with the power.
type volatileLock struct {
	fs *VolatileFS
	io.Closer
}

func (l *volatileLock) Close() error {
	l.fs.mu.Lock()
	defer l.fs.mu.Unlock()
	if _, held := l.fs.locks[l]; !held {
		return fmt.Errorf("lock: %w", fs.ErrClosed)
	}
	delete(l.fs.locks, l)
	return l.Closer.Close()
}
