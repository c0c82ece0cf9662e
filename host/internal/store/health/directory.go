package health

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

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

// relock makes and locks the lock file again, which somebody removed from a directory that is still locked.
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
	case err == nil && unlocked == nil:
		return true
	case err == nil:
		d.monitor.TakeOut("its lock file was removed or replaced", unlocked,
			"find out who changes files in .kvhost; kvhost makes it again and continues with what is there")
	}
	return false
}

// lockStands fails unless the lock file is the one that is locked. Where nobody can say, it is.
func (d *Directory) lockStands() error {
	now, err := d.monitor.bare.Stat(d.lock)
	d.mu.Lock()
	was := d.file
	d.mu.Unlock()
	switch {
	case err == nil && !now.Same(was):
		return fmt.Errorf("%s: inode %d, was %d", d.lock, now.Ino, was.Ino)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return err
	}
	return nil
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
	if NoSpace(err) {
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
	if NoSpace(err) {
		err = nil
	}
	return errors.Join(err, f.Close(), bare.Remove(name))
}
