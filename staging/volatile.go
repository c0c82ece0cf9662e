package staging

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
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

// changed notes a change of names in directories.
func (v *VolatileFS) changed(kept *keptFile, undo func() error, dirs ...string) {
	for i, d := range dirs {
		dirs[i] = filepath.Clean(d)
	}
	v.names = append(v.names, &nameChange{dirs: dirs, undo: undo, kept: kept})
}

// settle forgets the changes that are durable.
func (v *VolatileFS) settle() (err error) {
	left := v.names[:0]
	for _, c := range v.names {
		if !c.durable {
			left = append(left, c)
		} else if c.kept != nil {
			err = errors.Join(err, v.drop(c.kept))
		}
	}
	clear(v.names[len(left):])
	v.names = left
	return err
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

// remove unlinks a name after its file was kept.
func (v *VolatileFS) remove(name string) error {
	info, err := v.inner.Stat(name)
	if err == nil && info.IsDir() {
		if err := v.inner.Remove(name); err != nil {
			return err
		}
		v.changed(nil, func() error { return v.inner.Mkdir(name, info.Mode.Perm()) }, filepath.Dir(name))
		return nil
	}
	if err != nil {
		return v.inner.Remove(name) // which says why
	}
	k, err := v.keep(name)
	if err != nil {
		return err
	}
	if err := v.inner.Remove(name); err != nil {
		return errors.Join(err, v.drop(k))
	}
	v.changed(k, func() error { return v.inner.Link(k.link, name) }, filepath.Dir(name))
	return nil
}

// Remove implements [FS].
func (v *VolatileFS) Remove(name string) error {
	err := v.begin(OpRemove, name)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	return v.remove(name)
}

// Rename implements [FS]. It is one change: who replaces a file atomically has the old one or the new one after a crash.
func (v *VolatileFS) Rename(oldname, newname string) error {
	err := v.begin(OpRename, oldname)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	var k *keptFile
	if _, err := v.inner.Stat(newname); err == nil {
		if k, err = v.keep(newname); err != nil {
			return err
		}
	}
	if err := v.inner.Rename(oldname, newname); err != nil {
		if k != nil {
			err = errors.Join(err, v.drop(k))
		}
		return err
	}
	v.changed(k, func() error {
		if err := v.inner.Rename(newname, oldname); err != nil || k == nil {
			return err
		}
		return v.inner.Link(k.link, newname)
	}, filepath.Dir(oldname), filepath.Dir(newname))
	return nil
}

// RenameNoReplace implements [FS].
func (v *VolatileFS) RenameNoReplace(oldname, newname string) error {
	err := v.begin(OpPublish, oldname)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	if err := v.inner.RenameNoReplace(oldname, newname); err != nil {
		return err
	}
	v.changed(nil, func() error { return v.inner.Rename(newname, oldname) }, filepath.Dir(oldname), filepath.Dir(newname))
	return nil
}

// Link implements [FS].
func (v *VolatileFS) Link(oldname, newname string) error {
	err := v.begin(OpLink, oldname)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	if err := v.inner.Link(oldname, newname); err != nil {
		return err
	}
	v.changed(nil, func() error { return v.inner.Remove(newname) }, filepath.Dir(newname))
	return nil
}

// Mkdir implements [FS].
func (v *VolatileFS) Mkdir(name string, perm fs.FileMode) error {
	err := v.begin(OpMkdir, name)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	return v.mkdir(name, perm)
}

func (v *VolatileFS) mkdir(name string, perm fs.FileMode) error {
	if err := v.inner.Mkdir(name, perm); err != nil {
		return err
	}
	// What was made in it, and synced there, goes with it.
	v.changed(nil, func() error { return v.inner.Rename(name, v.buryName()) }, filepath.Dir(name))
	return nil
}

// MkdirAll implements [FS].
func (v *VolatileFS) MkdirAll(name string, perm fs.FileMode) error {
	err := v.begin(OpMkdir, name)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	var missing []string
	for d := filepath.Clean(name); ; d = filepath.Dir(d) {
		if _, err := v.inner.Stat(d); err == nil || d == filepath.Dir(d) {
			break
		}
		missing = append(missing, d)
	}
	for i := len(missing) - 1; i >= 0; i-- {
		if err := v.mkdir(missing[i], perm); err != nil {
			return err
		}
	}
	return v.inner.MkdirAll(name, perm) // which finds a file in a directory's place
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

// SyncDir implements [FS].
func (v *VolatileFS) SyncDir(name string) error {
	err := v.begin(OpSyncDir, name)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	if err := v.inner.SyncDir(name); err != nil {
		return err
	}
	// A journal commits in order: with a change of two directories goes all that led to it.
	synced := map[string]bool{filepath.Clean(name): true}
	for _, c := range slices.Backward(v.names) {
		for _, d := range c.dirs {
			c.durable = c.durable || synced[d]
		}
		for _, d := range c.dirs {
			synced[d] = synced[d] || c.durable
		}
	}
	return v.settle()
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
