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

// Directory is a root's: the one that was there when the root was opened, under its lock.
type Directory struct {
	path    string
	lock    string   // name of the lock file
	own     []string // directories that the store keeps in it
	alone   bool     // no other host uses it
	monitor *Monitor

	mu   sync.Mutex
	self staging.Info
	file staging.Info // the lock file
	held []io.Closer  // the last one is the lock file's
}

// NewDirectory is the directory of a monitored root.
func NewDirectory(m *Monitor, path, lock string, own []string, alone bool) *Directory {
	return &Directory{path: path, lock: lock, own: own, alone: alone, monitor: m}
}

// Lock locks the directory that is at the path now; Close gives it back.
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
	_ = Unlock(d.held) // of a directory that is gone, or on a file system that is
	d.self, d.file, d.held = self, file, locks
	return nil
}

// relock makes and locks the lock file again that was removed from a directory that is still locked.
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

// makeOwn makes the store's directories, durably: what the root holds is only as durable as they are.
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

// Close gives the locks back, if they are held.
func (d *Directory) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	held := d.held
	d.held = nil
	return Unlock(held)
}

// Owner is the directory's user.
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

// Present says whether the directory is still there, and takes its root out when it is not.
func (d *Directory) Present() bool {
	now, err := d.monitor.bare.Stat(d.path)
	var unlocked error
	if err == nil {
		if unlocked = d.lockStands(); unlocked != nil {
			now, err = d.monitor.bare.Stat(d.path) // the lock file may have gone with it
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

// lockStands fails unless the lock file is the one that is locked. Where that is unknown, it passes.
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

// Readable says whether the lock file can be read, as a file of the root that this host has made.
func (d *Directory) Readable() error { return ReadThrough(d.monitor.bare, d.lock, 1) }

// ReadThrough reads a file up to so many bytes, which are thrown away.
func ReadThrough(fsys staging.FS, name string, most int64) error {
	f, err := fsys.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.NewSectionReader(f, 0, most), make([]byte, min(most, 1<<20)))
	return errors.Join(err, f.Close())
}

// Same fails unless the directory is the one it was. A lock file that is gone is made again.
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

// Adopt fails unless the directory is the one it was, or one to continue with. A directory that was made anew on the
// same file system is taken, and is empty. One on another file system is taken only with the root's lock file in it:
// else it is the mount point of something that is not mounted, and to fill it would fill what is under it.
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
	// Its lock lets the files be looked for in it.
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

// Probe writes a page to a file of this name, reads it back and removes it. A file system that is full and otherwise
// sound passes.
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

// Lock takes a root's lock file, which keeps other hosts away, and, of a root that is not shared, the directory itself:
// whoever removes the file does not open the root to another host. It does not wait.
// prepare, if any, is called in between.
func Lock(fsys staging.FS, dir, file string, alone bool, prepare func() error) (locks []io.Closer, err error) {
	if alone {
		lock, err := fsys.Lock(dir)
		if errors.Is(err, staging.ErrLocked) {
			if other, ferr := fsys.Lock(file); ferr == nil {
				err = errors.Join(fmt.Errorf("%w, whose lock file was removed", err), other.Close())
			} else if errors.Is(ferr, staging.ErrLocked) {
				err = ferr // it says who
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

// MakeRoot makes a root's directory that is missing. It does not make what is above: where that is missing, a file system is not
// mounted most of the time, and kvhost would fill the one below. With dry another directory is made next to it, and removed.
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

// MissingRoot says whether a root's directory is to be made. It fails where the directory must not be used or made; with mount it must
// not be on the file system of /.
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

// cannotMake says what can be done where a root's directory cannot be made.
func cannotMake(dir string, err error) error {
	switch {
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: mount a writable file system, and name a directory there as the root", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: install -d -m 0700 -o %d %s", err, os.Geteuid(), dir)
	}
	return err
}

// mounted fails when a directory, or the one above it while it is missing, is on the file system of /.
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
		return nil // MakeRoot says that it is missing
	case err == nil && info.Dev == system.Dev:
		return fmt.Errorf("%w: mount its file system, or take require_mount away", ErrNotMounted)
	}
	return err
}

// Clear frees a name that the store needs for a file of its own, or for a directory, from what is of another kind. A
// link, a pipe, a socket or a device is unlinked. A file with several names, a file in a directory's place and a
// directory in a file's get another name next to it, because the operator may want them.
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
	log.Warn("what has the name of a file or directory of kvhost is something else, and is out of the way now", "name", name,
		"mode", info.Mode, "names", info.Links, "moved_to", filepath.Base(aside), "error", err)
	return err
}

// makeOwn makes a directory that the store keeps for itself below the root, and clears what is in its way.
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
