package faultfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// Machine is a [staging.FS] over another one, on a machine that can lose power: [Machine.PowerLoss] resets the directories to a
// state that a crash might have left.
//
// Synced data survives. Of data that was not synced, any page of a file may be lost, even if later pages survived, and
// so may a file's new length. Of the name changes in one directory the last ones may be lost, in each directory a
// random number. This loses more than any single file system would: a name can survive without its bytes, bytes without
// their name, and a synced file is lost with its unsynced name.
//
// A Machine keeps what it may have to restore until the change is synced: the old content of overwritten pages, and the files
// of removed names, as links in the trash directory. Directories must not be renamed, and no other process may change
// the files meanwhile.
type Machine struct {
	inner staging.FS
	trash string
	modes staging.DirectModes

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
	link  string           // its name in the trash
	refs  int              // open files that may write, and names that may be restored
	size  int64            // durable
	pages map[int64][]byte // durable content of pages written since; nil where it ended before them
}

// nameChange is a change of names that is lost or survives as a whole.
type nameChange struct {
	dirs    []string
	durable bool
	undo    func() error
	kept    *keptFile // whose name it took away, or nil
}

// NewMachine wraps inner. The trash is a directory on the same file system for the Machine alone. It is made if missing, and emptied.
func NewMachine(inner staging.FS, trash string) (*Machine, error) {
	if err := os.RemoveAll(trash); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(trash, 0o700); err != nil {
		return nil, err
	}
	return &Machine{inner: inner, trash: trash, files: map[fileID]*keptFile{}, locks: map[io.Closer]struct{}{}}, nil
}

// DirectModes makes v an FS with its own memory of which devices take direct I/O; see [staging.OpenDirect].
func (v *Machine) DirectModes() *staging.DirectModes { return &v.modes }

// begin takes the lock. The caller releases it, also after an error.
func (v *Machine) begin(op staging.Op, name string) error {
	v.mu.Lock()
	if v.down {
		return &fs.PathError{Op: op.String(), Path: name, Err: ErrPowerLost}
	}
	return nil
}

func (v *Machine) trashName() string {
	v.seq++
	return filepath.Join(v.trash, strconv.FormatUint(v.seq, 10))
}

// keep makes sure that the file at name can be restored, and takes a reference.
func (v *Machine) keep(name string) (*keptFile, error) {
	info, err := v.inner.Stat(name)
	if err != nil {
		return nil, err
	}
	id := fileID{info.Dev, info.Ino}
	k := v.files[id]
	if k == nil {
		k = &keptFile{link: v.trashName(), size: info.Size, pages: map[int64][]byte{}}
		if err := v.inner.Link(name, k.link); err != nil {
			return nil, err
		}
		v.files[id] = k
	}
	k.refs++
	return k, nil
}

// drop releases a reference. A file that has nothing left to lose, or no name any more, is forgotten.
func (v *Machine) drop(k *keptFile) error {
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

// synced records that a file's bytes are durable.
func (k *keptFile) synced(size int64) {
	clear(k.pages)
	k.size = size
}

// before saves the durable content of the pages of [off, off+n), which are about to change.
func (v *Machine) before(k *keptFile, off, n int64) error {
	var f staging.File
	defer func() {
		if f != nil {
			f.Close()
		}
	}()
	for page := off / staging.Align; page*staging.Align < off+n; page++ {
		if _, known := k.pages[page]; known {
			continue
		}
		if page*staging.Align >= k.size {
			k.pages[page] = nil
			continue
		}
		if f == nil {
			var err error
			if f, err = v.inner.OpenFile(k.link, os.O_RDONLY, 0); err != nil {
				return err
			}
		}
		old := make([]byte, min(staging.Align, k.size-page*staging.Align))
		if _, err := f.ReadAt(old, page*staging.Align); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		k.pages[page] = old
	}
	return nil
}

// OpenFile implements [staging.FS].
func (v *Machine) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	err := v.begin(staging.OpOpen, name)
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
	out := &crashFile{File: f, fs: v}
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

// ReadDir implements [staging.FS].
func (v *Machine) ReadDir(name string) ([]fs.DirEntry, error) {
	return ask(v, staging.OpReadDir, name, v.inner.ReadDir)
}

// Stat implements [staging.FS].
func (v *Machine) Stat(name string) (staging.Info, error) {
	return ask(v, staging.OpStat, name, func(name string) (staging.Info, error) {
		info, err := v.inner.Stat(name)
		return v.visible(info), err
	})
}

// visible subtracts the link in the trash from the link count.
func (v *Machine) visible(info staging.Info) staging.Info {
	if v.files[fileID{info.Dev, info.Ino}] != nil && info.Links > 0 {
		info.Links--
	}
	return info
}

// Statfs implements [staging.FS].
func (v *Machine) Statfs(name string) (staging.Space, error) {
	return ask(v, staging.OpStatfs, name, v.inner.Statfs)
}

func ask[T any](v *Machine, op staging.Op, name string, do func(string) (T, error)) (told T, err error) {
	err = v.begin(op, name)
	defer v.mu.Unlock()
	if err != nil {
		return told, err
	}
	return do(name)
}

// SyncFS implements [staging.FS].
func (v *Machine) SyncFS(name string) error {
	err := v.begin(staging.OpSyncFS, name)
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
	return v.forgetDurable()
}

// Lock implements [staging.FS].
func (v *Machine) Lock(name string) (io.Closer, error) {
	err := v.begin(staging.OpLock, name)
	defer v.mu.Unlock()
	if err != nil {
		return nil, err
	}
	inner, err := v.inner.Lock(name)
	if err != nil {
		return nil, err
	}
	l := &crashLock{fs: v, Closer: inner}
	v.locks[l] = struct{}{}
	return l, nil
}

// crashLock is released by a loss of power.
type crashLock struct {
	fs *Machine
	io.Closer
}

func (l *crashLock) Close() error {
	l.fs.mu.Lock()
	defer l.fs.mu.Unlock()
	if _, held := l.fs.locks[l]; !held {
		return fmt.Errorf("lock: %w", fs.ErrClosed)
	}
	delete(l.fs.locks, l)
	return l.Closer.Close()
}
