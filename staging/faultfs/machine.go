package faultfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
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
// the files.
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

// keptFile is a file with a state on disk that may differ from what is read.
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
	kept    *keptFile // the file of the name that it took away, or nil
}

// NewMachine wraps inner. The trash is a directory on the same file system for the Machine alone. It is made if missing,
// and emptied.
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

// begin takes the lock, unless the power is lost. The caller releases it.
func (v *Machine) begin(op staging.Op, name string) error {
	v.mu.Lock()
	if v.down {
		v.mu.Unlock()
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
	if err := v.begin(staging.OpOpen, name); err != nil {
		return nil, err
	}
	defer v.mu.Unlock()
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
	if err := v.begin(op, name); err != nil {
		return told, err
	}
	defer v.mu.Unlock()
	return do(name)
}

// SyncFS implements [staging.FS].
func (v *Machine) SyncFS(name string) error {
	if err := v.begin(staging.OpSyncFS, name); err != nil {
		return err
	}
	defer v.mu.Unlock()
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
	if err := v.begin(staging.OpLock, name); err != nil {
		return nil, err
	}
	defer v.mu.Unlock()
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

// crashFile records the durable content of what it overwrites.
type crashFile struct {
	staging.File
	fs   *Machine
	kept *keptFile // nil when it cannot write, and once it is closed
}

// ReadAt implements [staging.File].
func (f *crashFile) ReadAt(p []byte, off int64) (int, error) {
	if err := f.fs.begin(staging.OpRead, f.Name()); err != nil {
		return 0, err
	}
	defer f.fs.mu.Unlock()
	return f.File.ReadAt(p, off)
}

// WriteAt implements [staging.File].
func (f *crashFile) WriteAt(p []byte, off int64) (int, error) {
	if err := f.fs.begin(staging.OpWrite, f.Name()); err != nil {
		return 0, err
	}
	defer f.fs.mu.Unlock()
	if f.kept != nil && off >= 0 {
		if err := f.fs.before(f.kept, off, int64(len(p))); err != nil {
			return 0, err
		}
	}
	return f.File.WriteAt(p, off)
}

// Datasync implements [staging.File].
func (f *crashFile) Datasync() error {
	if err := f.fs.begin(staging.OpSync, f.Name()); err != nil {
		return err
	}
	defer f.fs.mu.Unlock()
	if err := f.File.Datasync(); err != nil {
		return err
	}
	info, err := f.File.Stat()
	if err != nil {
		return err
	}
	if k := f.fs.files[fileID{info.Dev, info.Ino}]; k != nil { // also through a descriptor that only reads
		k.synced(info.Size)
	}
	return nil
}

// Allocate implements [staging.File].
func (f *crashFile) Allocate(n int64) error {
	if err := f.fs.begin(staging.OpAllocate, f.Name()); err != nil {
		return err
	}
	defer f.fs.mu.Unlock()
	return f.File.Allocate(n)
}

// Stat implements [staging.File].
func (f *crashFile) Stat() (staging.Info, error) {
	return ask(f.fs, staging.OpStat, f.Name(), func(string) (staging.Info, error) {
		info, err := f.File.Stat()
		return f.fs.visible(info), err
	})
}

// Close implements [staging.File].
func (f *crashFile) Close() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	err := f.File.Close()
	if k := f.kept; k != nil {
		f.kept = nil
		if !f.fs.down {
			if derr := f.fs.drop(k); err == nil {
				err = derr
			}
		}
	}
	return err
}

// SetDirect implements [staging.DirectSetter].
func (f *crashFile) SetDirect(on bool) error {
	return f.File.(staging.DirectSetter).SetDirect(on)
}

// changed records a change of names in directories.
func (v *Machine) changed(kept *keptFile, undo func() error, dirs ...string) {
	for i, d := range dirs {
		dirs[i] = filepath.Clean(d)
	}
	v.names = append(v.names, &nameChange{dirs: dirs, undo: undo, kept: kept})
}

// forgetDurable drops the records of durable changes.
func (v *Machine) forgetDurable() (err error) {
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

// remove unlinks a name after keeping its file.
func (v *Machine) remove(name string) error {
	info, err := v.inner.Stat(name)
	if err == nil && info.IsDir() {
		if err := v.inner.Remove(name); err != nil {
			return err
		}
		// Where it stays away, so does all that went from it before.
		v.changed(nil, func() error { return v.inner.Mkdir(name, info.Mode.Perm()) }, filepath.Dir(name), name)
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

// Remove implements [staging.FS].
func (v *Machine) Remove(name string) error {
	if err := v.begin(staging.OpRemove, name); err != nil {
		return err
	}
	defer v.mu.Unlock()
	return v.remove(name)
}

// Rename implements [staging.FS]. It is one change: after a crash a replaced file is the old one or the new one.
func (v *Machine) Rename(oldname, newname string) error {
	if err := v.begin(staging.OpRename, oldname); err != nil {
		return err
	}
	defer v.mu.Unlock()
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

// RenameNoReplace implements [staging.FS].
func (v *Machine) RenameNoReplace(oldname, newname string) error {
	if err := v.begin(staging.OpPublish, oldname); err != nil {
		return err
	}
	defer v.mu.Unlock()
	if err := v.inner.RenameNoReplace(oldname, newname); err != nil {
		return err
	}
	v.changed(nil, func() error { return v.inner.Rename(newname, oldname) }, filepath.Dir(oldname), filepath.Dir(newname))
	return nil
}

// Link implements [staging.FS].
func (v *Machine) Link(oldname, newname string) error {
	if err := v.begin(staging.OpLink, oldname); err != nil {
		return err
	}
	defer v.mu.Unlock()
	if err := v.inner.Link(oldname, newname); err != nil {
		return err
	}
	v.changed(nil, func() error { return v.inner.Remove(newname) }, filepath.Dir(newname))
	return nil
}

// Mkdir implements [staging.FS].
func (v *Machine) Mkdir(name string, perm fs.FileMode) error {
	if err := v.begin(staging.OpMkdir, name); err != nil {
		return err
	}
	defer v.mu.Unlock()
	return v.mkdir(name, perm)
}

func (v *Machine) mkdir(name string, perm fs.FileMode) error {
	if err := v.inner.Mkdir(name, perm); err != nil {
		return err
	}
	// Its content is lost with it, even if that was synced.
	v.changed(nil, func() error { return v.inner.Rename(name, v.trashName()) }, filepath.Dir(name))
	return nil
}

// MkdirAll implements [staging.FS].
func (v *Machine) MkdirAll(name string, perm fs.FileMode) error {
	if err := v.begin(staging.OpMkdir, name); err != nil {
		return err
	}
	defer v.mu.Unlock()
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

// SyncDir implements [staging.FS].
func (v *Machine) SyncDir(name string) error {
	if err := v.begin(staging.OpSyncDir, name); err != nil {
		return err
	}
	defer v.mu.Unlock()
	if err := v.inner.SyncDir(name); err != nil {
		return err
	}
	// A journal commits in order: a durable change of two directories makes the earlier changes of both durable.
	synced := map[string]bool{filepath.Clean(name): true}
	for _, c := range slices.Backward(v.names) {
		for _, d := range c.dirs {
			c.durable = c.durable || synced[d]
		}
		for _, d := range c.dirs {
			synced[d] = synced[d] || c.durable
		}
	}
	return v.forgetDurable()
}

// PowerLoss cuts the power. Every later operation fails with [ErrPowerLost], all locks are released, and the
// directories are reset to a state that depends on the seed. To continue, call [NewMachine] again. A second PowerLoss does
// nothing.
func (v *Machine) PowerLoss(seed uint64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.down {
		return nil
	}
	v.down = true
	rng := rand.New(rand.NewPCG(seed, 0x706f776572))
	var errs []error
	for l := range v.locks {
		errs = append(errs, l.(*crashLock).Closer.Close())
	}
	clear(v.locks)
	// Lose all, none or some: losing a little of much is as likely as losing everything.
	share := []float64{0, 0.02, 0.2, 1}
	errs = append(errs, v.loseNames(rng, share[rng.IntN(len(share))]))
	for _, k := range v.ordered() {
		errs = append(errs, v.losePages(k, rng, share[rng.IntN(len(share))]))
	}
	errs = append(errs, os.RemoveAll(v.trash))
	v.names, v.files = nil, nil
	return errors.Join(errs...)
}

// ordered lists the kept files in the order in which they were kept, so that a seed always has the same effect.
func (v *Machine) ordered() []*keptFile {
	var list []*keptFile
	for _, k := range v.files {
		list = append(list, k)
	}
	slices.SortFunc(list, func(a, b *keptFile) int {
		if len(a.link) != len(b.link) {
			return len(a.link) - len(b.link) // numbers: the shorter is the smaller
		}
		return slices.Compare([]byte(a.link), []byte(b.link))
	})
	return list
}

// loseNames undoes changes, the latest first. If a change in a directory is lost, all later ones there are lost too.
func (v *Machine) loseNames(rng *rand.Rand, share float64) (err error) {
	cut := map[string]bool{}
	var lost []*nameChange
	for _, c := range v.names {
		gone := rng.Float64() < share
		for _, d := range c.dirs {
			gone = gone || cut[d]
		}
		if !gone {
			continue
		}
		for _, d := range c.dirs {
			cut[d] = true
		}
		lost = append(lost, c)
	}
	for _, c := range slices.Backward(lost) {
		err = errors.Join(err, c.undo())
	}
	return err
}

// losePages restores the durable content of some pages, and perhaps the durable length.
func (v *Machine) losePages(k *keptFile, rng *rand.Rand, share float64) error {
	f, err := v.inner.OpenFile(k.link, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	size := info.Size
	if share > 0 && rng.IntN(2) == 0 {
		size = k.size
	}
	pages := make([]int64, 0, len(k.pages))
	for page := range k.pages {
		pages = append(pages, page)
	}
	slices.Sort(pages)
	for _, page := range pages {
		cut := page*staging.Align >= info.Size && page*staging.Align < size // by a truncation that is lost
		if rng.Float64() >= share && !cut {
			continue
		}
		old := make([]byte, staging.Align)
		copy(old, k.pages[page])
		if _, err := f.WriteAt(old, page*staging.Align); err != nil {
			return err
		}
	}
	return unix.Ftruncate(int(f.Fd()), size)
}
