package health

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// Directory is the directory of a root as it was when the root was opened, with its locks.
type Directory struct {
	path    string
	lock    string   // name of the lock file
	own     []string // the store's own directories in it
	alone   bool     // no other host uses the root
	monitor *Monitor

	mu   sync.Mutex
	self staging.Info
	file staging.Info // identity of the lock file
	held []io.Closer  // held locks; the last one is the lock file's
}

// NewDirectory returns the directory of a monitored root.
func NewDirectory(m *Monitor, path, lock string, own []string, alone bool) *Directory {
	return &Directory{path: path, lock: lock, own: own, alone: alone, monitor: m}
}

// Lock locks the directory that is now at the path. Close releases the locks.
func (d *Directory) Lock() error {
	bare := d.monitor.bare
	locks, err := Lock(bare, d.path, d.lock, d.alone, d.makeOwn)
	if err != nil {
		return err
	}
	self, err := bare.Stat(d.path)
	var file staging.Info
	if err == nil {
		file, err = bare.Stat(d.lock)
	}
	if err != nil {
		return errors.Join(err, Unlock(locks))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	_ = Unlock(d.held) // their directory, or its file system, is gone
	d.self, d.file, d.held = self, file, locks
	return nil
}

// relock creates and locks the lock file again after it was removed from a directory that is still locked.
func (d *Directory) relock() error {
	bare := d.monitor.bare
	if err := d.makeOwn(); err != nil {
		return err
	}
	lock, err := bare.Lock(d.lock)
	if err != nil {
		return err
	}
	file, err := bare.Stat(d.lock)
	d.mu.Lock()
	defer d.mu.Unlock()
	last := len(d.held) - 1
	if err == nil && last < 0 {
		err = ErrOut
	}
	if err != nil {
		return errors.Join(err, lock.Close())
	}
	_ = d.held[last].Close()
	d.file, d.held[last] = file, lock
	return nil
}

// makeOwn creates the store's own directories durably, because files in the root are only as durable as their directories.
func (d *Directory) makeOwn() error {
	bare, log := d.monitor.bare, d.monitor.cfg.Log
	synced := []string{d.path}
	for _, own := range d.own {
		if err := makeOwn(bare, d.path, own, log); err != nil {
			return err
		}
		if above := filepath.Join(d.path, filepath.Dir(own)); !slices.Contains(synced, above) {
			synced = append(synced, above)
		}
	}
	for _, dir := range synced {
		if err := bare.SyncDir(dir); err != nil {
			return err
		}
	}
	return Clear(bare, d.lock, false, log)
}

// Close releases the locks if they are held.
func (d *Directory) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	held := d.held
	d.held = nil
	return Unlock(held)
}

// Owner returns the user that owns the directory.
func (d *Directory) Owner() uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.self.Owner
}

func (d *Directory) same(now staging.Info) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return now.Same(d.self)
}

// Present reports whether the directory is still there. If it is not, Present takes the root out of service.
func (d *Directory) Present() bool {
	now, err := d.monitor.bare.Stat(d.path)
	var unlocked error
	if err == nil {
		if unlocked = d.lockStands(); unlocked != nil {
			now, err = d.monitor.bare.Stat(d.path) // the lock file may have disappeared together with the directory
		}
	}
	switch {
	case Hung(err):
		d.monitor.Saw(staging.OpStat, d.path, err)
	case errors.Is(err, fs.ErrNotExist):
		d.monitor.TakeOut("its directory is gone", err, "make the directory or mount it; kvhost continues with what is there")
	case err == nil && !d.same(now):
		d.mu.Lock()
		was := d.self
		d.mu.Unlock()
		err = fmt.Errorf("inode %d of device %#x, was %d of %#x", now.Ino, now.Dev, was.Ino, was.Dev)
		d.monitor.TakeOut("another directory is at its path", err,
			"mount the root's file system again, or restart kvhost to use what is there")
	case err == nil && errors.Is(unlocked, unix.ENOLINK):
		d.monitor.Demote(ReadOnly, "its lock has lapsed, so that nothing is written", unlocked, d.monitor.advice())
		return true
	case err == nil && unlocked == nil:
		return true
	case err == nil:
		d.monitor.TakeOut("its lock file was removed or replaced", unlocked,
			"find out who changes files in .kvhost; kvhost makes it again and continues with what is there")
	}
	return false
}

// lockStands returns an error if the lock file is known not to be the locked one.
func (d *Directory) lockStands() error {
	now, err := d.monitor.bare.Stat(d.lock)
	d.mu.Lock()
	was := d.file
	d.mu.Unlock()
	switch {
	case err == nil && !now.Same(was):
		return fmt.Errorf("%s: inode %d, was %d", d.lock, now.Ino, was.Ino)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENOLINK):
		return err
	}
	return nil
}

// Readable returns an error if the lock file cannot be read. The lock file stands for all files of the root that this host has
// written.
func (d *Directory) Readable() error { return ReadThrough(d.monitor.bare, d.lock, 1) }

// ReadThrough reads a file up to a number of bytes, and discards them.
func ReadThrough(fsys staging.FS, name string, most int64) error {
	f, err := fsys.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.NewSectionReader(f, 0, most), make([]byte, min(most, 1<<20)))
	return errors.Join(err, f.Close())
}

// Same returns an error unless the directory is the original one. It creates a missing lock file again.
func (d *Directory) Same() error {
	now, err := d.monitor.bare.Stat(d.path)
	switch {
	case err != nil:
		return err
	case !d.same(now):
		return fmt.Errorf("%w: %s is another directory than it was", ErrOut, d.path)
	case d.lockStands() != nil:
		return d.relock()
	}
	return nil
}

// Adopt returns an error unless the directory is the original one, or one that may replace it. A new directory on the same file
// system is accepted, as an empty one. A directory on another file system is accepted only if it contains the root's lock file.
// Otherwise it is probably the mount point of a file system that is not mounted, and kvhost would fill the file system below.
func (d *Directory) Adopt() (empty bool, err error) {
	bare := d.monitor.bare
	now, err := bare.Stat(d.path)
	if err != nil {
		return false, err
	}
	if d.same(now) {
		return false, d.Same()
	}
	d.mu.Lock()
	was := d.self
	d.mu.Unlock()
	// The directory is locked while its files are examined.
	self, err := bare.Lock(d.path)
	if err != nil {
		return false, err
	}
	_, err = bare.Stat(d.lock)
	empty = errors.Is(err, fs.ErrNotExist)
	if err := self.Close(); err != nil {
		return false, err
	}
	switch {
	case err != nil && !empty:
		return false, err
	case empty && now.Dev != was.Dev:
		return false, fmt.Errorf("%w: %s is on another file system and was never a root", ErrOut, d.path)
	}
	return empty, d.Lock()
}

// Probe writes a page to a file with this name, reads it back and removes the file. A full file system that is otherwise
// healthy passes.
func (d *Directory) Probe(name string) error {
	bare := d.monitor.bare
	f, err := bare.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if Judge(err) == NoRoom {
		return nil
	}
	if err != nil {
		return err
	}
	page, got := bytes.Repeat([]byte("kvhost probe\n"), 300), make([]byte, 3900)
	_, err = f.WriteAt(page, 0)
	if err == nil {
		err = f.Datasync()
	}
	if err == nil {
		if _, err = f.ReadAt(got, 0); err == nil && !bytes.Equal(page, got) {
			err = fmt.Errorf("%w: %s", ErrProbe, name)
		}
	}
	if Judge(err) == NoRoom {
		err = nil
	}
	return errors.Join(err, f.Close(), bare.Remove(name))
}

// Lock takes the lock file of a root, which excludes other hosts. For a root that is not shared it also locks the directory
// itself, so that removing the file does not admit another host. It does not wait. prepare is called between the two locks if
// it is not nil.
func Lock(fsys staging.FS, dir, file string, alone bool, prepare func() error) (locks []io.Closer, err error) {
	if alone {
		lock, err := fsys.Lock(dir)
		if errors.Is(err, staging.ErrLocked) {
			if other, ferr := fsys.Lock(file); ferr == nil {
				err = errors.Join(fmt.Errorf("%w, whose lock file was removed", err), other.Close())
			} else if errors.Is(ferr, staging.ErrLocked) {
				err = ferr // this error names the holder
			}
		}
		if err != nil {
			return nil, err
		}
		locks = append(locks, lock)
	}
	if prepare != nil {
		err = prepare()
	}
	var lock io.Closer
	if err == nil {
		lock, err = fsys.Lock(file)
	}
	if err != nil {
		return nil, errors.Join(err, Unlock(locks))
	}
	return append(locks, lock), nil
}

func Unlock(locks []io.Closer) error {
	var errs []error
	for _, lock := range locks {
		errs = append(errs, lock.Close())
	}
	return errors.Join(errs...)
}

// MakeRoot creates the missing directory of a root. It does not create the directories above: if they are missing, usually a
// file system is not mounted, and kvhost would fill the one below. With dry set, it creates a directory next to it instead, and
// removes it.
func MakeRoot(fsys staging.FS, dir string, dry bool) error {
	if !dry {
		err := fsys.Mkdir(dir, 0o700)
		if errors.Is(err, fs.ErrExist) { // another host was faster
			return nil
		}
		return cannotMake(dir, err)
	}
	other := filepath.Join(filepath.Dir(dir), fmt.Sprintf(".kvhost-check-%d", os.Getpid()))
	err := os.Mkdir(other, 0o700)
	if err == nil {
		return os.Remove(other)
	}
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		err = &fs.PathError{Op: path.Op, Path: dir, Err: path.Err}
	}
	return cannotMake(dir, err)
}

// MissingRoot reports whether the directory of a root has to be created. It returns an error if the directory must not be used
// or created. With mount set, it must not be on the file system of /.
func MissingRoot(fsys staging.FS, dir string, mount bool) (missing bool, err error) {
	if mount {
		if err := mounted(fsys, dir); err != nil {
			return false, err
		}
	}
	info, err := fsys.Stat(dir)
	switch {
	case err == nil && !info.IsDir():
		return false, &fs.PathError{Op: "mkdir", Path: dir, Err: unix.ENOTDIR}
	case !errors.Is(err, fs.ErrNotExist):
		return false, err
	}
	above := filepath.Dir(dir)
	if _, err := staging.OS().Stat(above); err != nil {
		return true, fmt.Errorf("%w: %s: mount its file system, or mkdir -p %s", ErrNoParent, above, above)
	}
	return true, nil
}

// cannotMake adds advice to the error of creating a root's directory.
func cannotMake(dir string, err error) error {
	switch {
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: mount a writable file system, and name a directory there as the root", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: install -d -m 0700 -o %d %s", err, os.Geteuid(), dir)
	}
	return err
}

// mounted returns an error if a directory is on the file system of /. If the directory is missing, the one above it counts.
func mounted(fsys staging.FS, dir string) error {
	system, err := staging.OS().Stat("/")
	if err != nil {
		return err
	}
	info, err := fsys.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		info, err = staging.OS().Stat(filepath.Dir(dir))
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // MakeRoot reports that it is missing
	case err == nil && info.Dev == system.Dev:
		return fmt.Errorf("%w: mount its file system, or take require_mount away", ErrNotMounted)
	}
	return err
}

// Clear removes or renames an object that has the name of a file or directory of the store but is of another kind. A link, pipe,
// socket or device is removed. A file with several names, a file in the place of a directory, and a directory in the place of a file are
// renamed, because the operator may want them.
func Clear(fsys staging.FS, name string, directory bool, log *slog.Logger) error {
	info, err := fsys.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case directory && info.IsDir(), !directory && info.Mode.IsRegular() && info.Links == 1:
		return nil
	}
	aside := ""
	if info.IsDir() || info.Mode.IsRegular() {
		aside = fmt.Sprintf("%s.moved-%x", name, time.Now().UnixNano())
		err = fsys.RenameNoReplace(name, aside)
	} else {
		err = fsys.Remove(name)
	}
	log.Warn("a file or directory with a name of kvhost's own was something else, and is out of the way now", "name", name,
		"mode", info.Mode, "names", info.Links, "moved_to", filepath.Base(aside), "error", err)
	return err
}

// makeOwn creates one of the store's own directories below the root, and clears obstacles.
func makeOwn(fsys staging.FS, root, dir string, log *slog.Logger) error {
	err := fsys.MkdirAll(root+"/"+dir, 0o700)
	if !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if above := filepath.Dir(dir); above != "." {
		if err := makeOwn(fsys, root, above, log); err != nil {
			return err
		}
	}
	if err := Clear(fsys, root+"/"+dir, true, log); err != nil {
		return err
	}
	return fsys.MkdirAll(root+"/"+dir, 0o700)
}
