package faultfs

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
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
	staging.Around // the disk, while there is power
	modes          staging.DirectModes

	mu   sync.Mutex // held during every operation
	down bool
	disk *disk
}

// disk is a file system below which a Machine keeps what it may have to restore. Machine.mu guards it.
type disk struct {
	staging.FS
	machine *Machine
	trash   string
	seq     uint64
	files   map[fileID]*keptFile
	names   []*nameChange // not durable, oldest first
	locks   map[*crashLock]struct{}
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
	v := &Machine{}
	v.disk = &disk{FS: inner, machine: v, trash: trash, files: map[fileID]*keptFile{}, locks: map[*crashLock]struct{}{}}
	v.Around = staging.Around{Inner: v.disk, Run: v.run}
	return v, nil
}

// DirectModes makes v an FS with its own memory of which devices take direct I/O; see [staging.OpenDirect].
func (v *Machine) DirectModes() *staging.DirectModes { return &v.modes }

// run makes an operation, unless the power is lost.
func (v *Machine) run(c staging.Call) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.down {
		return &fs.PathError{Op: c.Op.String(), Path: c.Name, Err: ErrPowerLost}
	}
	return c.Do()
}

func (v *disk) trashName() string {
	v.seq++
	return filepath.Join(v.trash, strconv.FormatUint(v.seq, 10))
}

// keep makes sure that the file at name can be restored, and takes a reference.
func (v *disk) keep(name string) (*keptFile, error) {
	info, err := v.FS.Stat(name)
	if err != nil {
		return nil, err
	}
	id := fileID{info.Dev, info.Ino}
	k := v.files[id]
	if k == nil {
		k = &keptFile{link: v.trashName(), size: info.Size, pages: map[int64][]byte{}}
		if err := v.FS.Link(name, k.link); err != nil {
			return nil, err
		}
		v.files[id] = k
	}
	k.refs++
	return k, nil
}

// drop releases a reference. A file that has nothing left to lose, or no name any more, is forgotten.
func (v *disk) drop(k *keptFile) error {
	if k.refs--; k.refs > 0 {
		return nil
	}
	info, err := v.FS.Stat(k.link)
	if err != nil {
		return err
	}
	if info.Links > 1 && !(len(k.pages) == 0 && k.size == info.Size) {
		return nil
	}
	delete(v.files, fileID{info.Dev, info.Ino})
	return v.FS.Remove(k.link)
}

// synced records that a file's bytes are durable.
func (k *keptFile) synced(size int64) {
	clear(k.pages)
	k.size = size
}

// before saves the durable content of the pages of [off, off+n), which are about to change.
func (v *disk) before(k *keptFile, off, n int64) error {
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
			if f, err = v.FS.OpenFile(k.link, os.O_RDONLY, 0); err != nil {
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

func (v *disk) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	_, missing := v.FS.Stat(name)
	f, err := v.FS.OpenFile(name, flag&^os.O_TRUNC, perm)
	if err != nil {
		return nil, err
	}
	if missing != nil {
		v.changed(nil, func() error { return v.FS.Remove(name) }, filepath.Dir(name))
	}
	out := &crashFile{File: f, disk: v}
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

func (v *disk) Stat(name string) (staging.Info, error) {
	info, err := v.FS.Stat(name)
	return v.visible(info), err
}

// visible subtracts the link in the trash from the link count.
func (v *disk) visible(info staging.Info) staging.Info {
	if v.files[fileID{info.Dev, info.Ino}] != nil && info.Links > 0 {
		info.Links--
	}
	return info
}

func (v *disk) SyncFS(name string) error {
	if err := v.FS.SyncFS(name); err != nil {
		return err
	}
	for _, c := range v.names {
		c.durable = true
	}
	for _, k := range v.files {
		info, err := v.FS.Stat(k.link)
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

func (v *disk) Lock(name string) (io.Closer, error) {
	inner, err := v.FS.Lock(name)
	if err != nil {
		return nil, err
	}
	l := &crashLock{disk: v, Closer: inner}
	v.locks[l] = struct{}{}
	return l, nil
}

// crashLock is released by a loss of power.
type crashLock struct {
	disk *disk
	io.Closer
}

func (l *crashLock) Close() error {
	l.disk.machine.mu.Lock()
	defer l.disk.machine.mu.Unlock()
	if _, held := l.disk.locks[l]; !held {
		return fmt.Errorf("lock: %w", fs.ErrClosed)
	}
	delete(l.disk.locks, l)
	return l.Closer.Close()
}

// crashFile records the durable content of what it overwrites.
type crashFile struct {
	staging.File
	disk *disk
	kept *keptFile // nil when it cannot write, and once it is closed
}

func (f *crashFile) run(op staging.Op, do func() error) error {
	return f.disk.machine.run(staging.Call{Op: op, Name: f.Name(), Do: do})
}

func (f *crashFile) ReadAt(p []byte, off int64) (n int, err error) {
	err = f.run(staging.OpRead, func() error { n, err = f.File.ReadAt(p, off); return err })
	return n, err
}

func (f *crashFile) WriteAt(p []byte, off int64) (n int, err error) {
	err = f.run(staging.OpWrite, func() error {
		if f.kept != nil && off >= 0 {
			if err := f.disk.before(f.kept, off, int64(len(p))); err != nil {
				return err
			}
		}
		n, err = f.File.WriteAt(p, off)
		return err
	})
	return n, err
}

func (f *crashFile) Datasync() error {
	return f.run(staging.OpSync, func() error {
		if err := f.File.Datasync(); err != nil {
			return err
		}
		info, err := f.File.Stat()
		if k := f.disk.files[fileID{info.Dev, info.Ino}]; err == nil && k != nil { // also through a descriptor that only reads
			k.synced(info.Size)
		}
		return err
	})
}

func (f *crashFile) Allocate(n int64) error {
	return f.run(staging.OpAllocate, func() error { return f.File.Allocate(n) })
}

func (f *crashFile) Stat() (staging.Info, error) {
	return staging.Told(f.disk.machine.run, staging.OpStat, f.Name(), func() (staging.Info, error) {
		info, err := f.File.Stat()
		return f.disk.visible(info), err
	})
}

func (f *crashFile) Close() error {
	machine := f.disk.machine
	machine.mu.Lock()
	defer machine.mu.Unlock()
	err := f.File.Close()
	if k := f.kept; k != nil {
		f.kept = nil
		if !machine.down {
			if derr := f.disk.drop(k); err == nil {
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
func (v *disk) changed(kept *keptFile, undo func() error, dirs ...string) {
	for i, d := range dirs {
		dirs[i] = filepath.Clean(d)
	}
	v.names = append(v.names, &nameChange{dirs: dirs, undo: undo, kept: kept})
}

// forgetDurable drops the records of durable changes.
func (v *disk) forgetDurable() (err error) {
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

// Remove implements [staging.FS]. It keeps the file.
func (v *disk) Remove(name string) error {
	info, err := v.FS.Stat(name)
	if err == nil && info.IsDir() {
		if err := v.FS.Remove(name); err != nil {
			return err
		}
		// Where it stays away, so does all that went from it before.
		v.changed(nil, func() error { return v.FS.Mkdir(name, info.Mode.Perm()) }, filepath.Dir(name), name)
		return nil
	}
	if err != nil {
		return v.FS.Remove(name) // which says why
	}
	k, err := v.keep(name)
	if err != nil {
		return err
	}
	if err := v.FS.Remove(name); err != nil {
		return errors.Join(err, v.drop(k))
	}
	v.changed(k, func() error { return v.FS.Link(k.link, name) }, filepath.Dir(name))
	return nil
}

// Rename implements [staging.FS]. It is one change: after a crash a replaced file is the old one or the new one.
func (v *disk) Rename(oldname, newname string) error {
	var k *keptFile
	if _, err := v.FS.Stat(newname); err == nil {
		if k, err = v.keep(newname); err != nil {
			return err
		}
	}
	if err := v.FS.Rename(oldname, newname); err != nil {
		if k != nil {
			err = errors.Join(err, v.drop(k))
		}
		return err
	}
	v.changed(k, func() error {
		if err := v.FS.Rename(newname, oldname); err != nil || k == nil {
			return err
		}
		return v.FS.Link(k.link, newname)
	}, filepath.Dir(oldname), filepath.Dir(newname))
	return nil
}

func (v *disk) RenameNoReplace(oldname, newname string) error {
	if err := v.FS.RenameNoReplace(oldname, newname); err != nil {
		return err
	}
	v.changed(nil, func() error { return v.FS.Rename(newname, oldname) }, filepath.Dir(oldname), filepath.Dir(newname))
	return nil
}

func (v *disk) Link(oldname, newname string) error {
	if err := v.FS.Link(oldname, newname); err != nil {
		return err
	}
	v.changed(nil, func() error { return v.FS.Remove(newname) }, filepath.Dir(newname))
	return nil
}

func (v *disk) Mkdir(name string, perm fs.FileMode) error {
	if err := v.FS.Mkdir(name, perm); err != nil {
		return err
	}
	// Its content is lost with it, even if that was synced.
	v.changed(nil, func() error { return v.FS.Rename(name, v.trashName()) }, filepath.Dir(name))
	return nil
}

func (v *disk) MkdirAll(name string, perm fs.FileMode) error {
	var missing []string
	for d := filepath.Clean(name); ; d = filepath.Dir(d) {
		if _, err := v.FS.Stat(d); err == nil || d == filepath.Dir(d) {
			break
		}
		missing = append(missing, d)
	}
	for i := len(missing) - 1; i >= 0; i-- {
		if err := v.Mkdir(missing[i], perm); err != nil {
			return err
		}
	}
	return v.FS.MkdirAll(name, perm) // which finds a file in a directory's place
}

func (v *disk) SyncDir(name string) error {
	if err := v.FS.SyncDir(name); err != nil {
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
	d, rng := v.disk, rand.New(rand.NewPCG(seed, 0x706f776572))
	var errs []error
	for l := range d.locks {
		errs = append(errs, l.Closer.Close())
	}
	clear(d.locks)
	// Lose all, none or some: losing a little of much is as likely as losing everything.
	share := []float64{0, 0.02, 0.2, 1}
	errs = append(errs, d.loseNames(rng, share[rng.IntN(len(share))]))
	for _, k := range d.ordered() {
		errs = append(errs, d.losePages(k, rng, share[rng.IntN(len(share))]))
	}
	errs = append(errs, os.RemoveAll(d.trash))
	d.names, d.files = nil, nil
	return errors.Join(errs...)
}

// ordered lists the kept files in the order in which they were kept, so that a seed always has the same effect.
func (v *disk) ordered() []*keptFile {
	return slices.SortedFunc(maps.Values(v.files), func(a, b *keptFile) int {
		return cmp.Or(len(a.link)-len(b.link), cmp.Compare(a.link, b.link)) // numbers: the shorter is the smaller
	})
}

// loseNames undoes changes, the latest first. If a change in a directory is lost, all later ones there are lost too.
func (v *disk) loseNames(rng *rand.Rand, share float64) (err error) {
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
func (v *disk) losePages(k *keptFile, rng *rand.Rand, share float64) error {
	f, err := v.FS.OpenFile(k.link, os.O_RDWR, 0)
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
	for _, page := range slices.Sorted(maps.Keys(k.pages)) {
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
