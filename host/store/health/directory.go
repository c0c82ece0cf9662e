package health

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"

	"github.com/kvhost/kvhost/staging"
)

// Directory is a root's: the one that was there when the root was opened, under its lock.
type Directory struct {
	path    string
	lock    string   // name of the lock file
	own     []string // directories that the store keeps in it
	monitor *Monitor

	mu   sync.Mutex
	self staging.Info
	held io.Closer
}

// NewDirectory is the directory of a monitored root.
func NewDirectory(m *Monitor, path, lock string, own []string) *Directory {
	return &Directory{path: path, lock: lock, own: own, monitor: m}
}

// Opened notes the directory and its lock, which Close gives back.
func (d *Directory) Opened(self staging.Info, held io.Closer) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.self, d.held = self, held
}

// Close gives the lock back, if it is held.
func (d *Directory) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held == nil {
		return nil
	}
	err := d.held.Close()
	d.held = nil
	return err
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
	default:
		return err == nil
	}
	return false
}

// Same fails unless the directory is the one it was.
func (d *Directory) Same() error {
	now, err := d.monitor.bare.Stat(d.path)
	if err == nil && !d.same(now) {
		err = fmt.Errorf("%w: %s is another directory than it was", ErrOut, d.path)
	}
	return err
}

// Adopt fails unless the directory is the one it was, or one to continue with. A directory that was made anew on the
// same file system is taken, and is empty. One on another file system is taken only with the root's lock file in it:
// else it is the mount point of something that is not mounted, and to fill it would fill what is under it.
func (d *Directory) Adopt() (empty bool, err error) {
	bare := d.monitor.bare
	now, err := bare.Stat(d.path)
	if err != nil || d.same(now) {
		return false, err
	}
	d.mu.Lock()
	was := d.self
	d.mu.Unlock()
	_, err = bare.Stat(d.lock)
	empty = errors.Is(err, fs.ErrNotExist)
	switch {
	case err != nil && !empty:
		return false, err
	case empty && now.Dev != was.Dev:
		return false, fmt.Errorf("%w: %s is on another file system and was never a root", ErrOut, d.path)
	}
	for _, own := range d.own {
		if err := bare.MkdirAll(d.path+"/"+own, 0o700); err != nil {
			return false, err
		}
	}
	lock, err := bare.Lock(d.lock)
	if err != nil {
		return false, err
	}
	_ = d.Close() // of a file that is gone, or on a file system that is
	d.Opened(now, lock)
	return empty, nil
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
