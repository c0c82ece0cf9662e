package files

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// maxMade is how often an operation makes the directory that it needs. It may be removed each time before it is used.
const maxMade = 4

// InDir tries an operation that gives a file the name, and tries again with the directory made where that is not there.
func (d *Dir) InDir(name string, try func() error) error {
	err := try()
	for n := 0; n < maxMade && errors.Is(err, fs.ErrNotExist); n++ {
		if err := d.MakeDir(filepath.Dir(name)); err != nil {
			return err
		}
		err = try()
	}
	return err
}

// OwnDirs says that no other host uses the directories: those that are left empty go, and those that are there count. It is
// called before the Dir is used.
func (d *Dir) OwnDirs() { d.owned = true }

// Leave removes the directory that a file was in, and those above it, where nothing is left in them. Each is a block of the
// file system, which no account has, and a place policy may make one for each piece. A put that found one of them there
// makes it again (InDir). That costs a put half as much again where each piece has one, so those that are tolerated stay.
// Directories that are shared stay: other hosts may be older.
func (d *Dir) Leave(name string) {
	if !d.owned || !d.account.DirectoriesGo() || strings.HasPrefix(name[min(len(d.Slash), len(name)):], pieceformat.MetaDir+"/") {
		return
	}
	for dir := filepath.Dir(name); len(dir) > len(d.Path) && d.drop(dir); dir = filepath.Dir(dir) {
	}
}

// drop removes a directory that is empty, while no name is made durable: no put may take its name for durable without
// seeing it go.
func (d *Dir) drop(dir string) bool {
	d.settling.Lock()
	defer d.settling.Unlock()
	if d.FS.Remove(dir) != nil {
		return false
	}
	d.lasting.Delete(dir)
	d.changed(dir, false)
	return true
}

// dirBytes is what a directory takes: a block. One with many names takes more, less than half of what is tolerated for
// each of them.
const dirBytes = 4096

// make makes a directory and those above it that are missing, and counts them.
func (d *Dir) make(dir string) error {
	d.settling.Lock()
	defer d.settling.Unlock()
	var missing []string
	for above := dir; len(above) > len(d.Path); above = filepath.Dir(above) {
		if _, err := d.FS.Stat(above); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		d.lasting.Delete(above) // the name is a new one
		missing = append(missing, above)
	}
	err := d.FS.MkdirAll(dir, 0o700)
	if err == nil && d.owned {
		for _, above := range missing {
			d.changed(above, true)
		}
	}
	return err
}

// counting is the state of a count of directories. It is guarded by settling.
type counting struct {
	booked  int64               // what is in the account: a count finds it again
	unread  map[string]struct{} // directories that are not read yet: those inside them are left to the count
	reading string              // the one of them that is being read
	changes map[string]bool     // what came (true) or went in it during the reading
}

// changed books a directory that came or went, unless a count has yet to find it so. The caller holds settling.
func (d *Dir) changed(dir string, came bool) {
	c := &d.counting
	above := filepath.Dir(dir)
	if len(c.unread) > 0 && above == c.reading {
		c.changes[dir] = came
		return
	}
	for len(c.unread) > 0 && len(above) >= len(d.Path) {
		if _, ok := c.unread[above]; ok {
			return
		}
		above = filepath.Dir(above)
	}
	if came {
		d.book(1)
	} else {
		d.book(-1)
	}
}

// book puts so many more directories into the account. The caller holds settling.
func (d *Dir) book(more int64) {
	before := d.counting.booked
	d.counting.booked = max(0, before+more*dirBytes)
	d.account.Directories(d.counting.booked - before)
}

// CountDirs counts the directories that are there when the root is opened, while others come and go. Those without others
// in them, nearly all, are not read where the file system counts a directory's own (as links to it).
func (d *Dir) CountDirs(ctx context.Context) {
	pending := []string{d.Path}
	d.settling.Lock()
	d.counting.unread = map[string]struct{}{d.Path: {}}
	d.book(1 - d.counting.booked/dirBytes)
	d.settling.Unlock()
	for len(pending) > 0 && ctx.Err() == nil {
		dir := pending[len(pending)-1]
		pending = pending[:len(pending)-1]
		d.settling.Lock()
		d.counting.reading, d.counting.changes = dir, map[string]bool{}
		d.settling.Unlock()
		inside := d.read(dir)
		d.settling.Lock()
		c := &d.counting
		for name, there := range c.changes {
			if delete(inside, name); there {
				inside[name] = struct{}{}
			}
		}
		delete(c.unread, dir)
		for name := range inside {
			c.unread[name] = struct{}{}
			pending = append(pending, name)
		}
		d.book(int64(len(inside)))
		d.settling.Unlock()
	}
	d.settling.Lock()
	defer d.settling.Unlock()
	d.counting = counting{booked: d.counting.booked}
}

// read lists the directories in one.
func (d *Dir) read(dir string) map[string]struct{} {
	inside := map[string]struct{}{}
	info, err := d.FS.Stat(dir)
	if err != nil || !info.IsDir() || info.Links == noneInside {
		return inside // it went, or may not be read, or none is in it
	}
	list, err := d.FS.ReadDir(dir)
	if err != nil {
		return inside
	}
	for _, e := range list {
		if e.Name() == pieceformat.MetaDir && dir != d.Path {
			return map[string]struct{}{} // another root's
		}
		if e.IsDir() {
			inside[dir+"/"+e.Name()] = struct{}{}
		}
	}
	return inside
}

// noneInside is how many links a directory without others in it has: its name, and its own entry for itself.
const noneInside = 2

// maxLasting is how many directories are remembered as durable.
const maxLasting = 1 << 16

// MakeDir makes a directory below the root, and where names are made durable those of all its levels.
func (d *Dir) MakeDir(dir string) error {
	if err := d.make(dir); err != nil || !d.strict {
		return err
	}
	d.settling.RLock()
	defer d.settling.RUnlock()
	return d.settle(dir)
}

// SyncBytes makes the bytes of a file durable that another process has written: a host, perhaps, that syncs nothing.
func (d *Dir) SyncBytes(name string) error {
	f, err := d.FS.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return fmt.Errorf("store: syncing %s: %w", name, err)
	}
	defer f.Close()
	if err := f.Datasync(); err != nil {
		return d.SyncFailed(err)
	}
	return nil
}

// SyncName makes the names in a directory durable, and those of the directories above it.
func (d *Dir) SyncName(dir string) error {
	if err := d.FS.SyncDir(dir); err != nil {
		return d.SyncFailed(err)
	}
	d.settling.RLock()
	defer d.settling.RUnlock()
	return d.settle(dir)
}

// settle makes the names of a directory and of those above it durable, unless this process has done that. Those that
// were there may have been made by a process that was killed, or by a put that is about to do the same.
func (d *Dir) settle(dir string) error {
	for above := dir; len(above) > len(d.Path); above = filepath.Dir(above) {
		if _, ok := d.lasting.Load(above); ok {
			continue
		}
		if err := d.FS.SyncDir(filepath.Dir(above)); err != nil {
			return d.SyncFailed(err)
		}
		if d.lastingN.Add(1) > maxLasting { // a place policy may make as many as it likes
			d.ForgetDirs()
		}
		d.lasting.Store(above, struct{}{})
	}
	return nil
}

// ForgetDirs forgets which names are durable, as of a root that was out of service.
func (d *Dir) ForgetDirs() {
	d.lasting.Clear()
	d.lastingN.Store(0)
}

// SyncFailed counts a sync that failed, and returns its error.
func (d *Dir) SyncFailed(cause error) error {
	d.SyncFails.Add(1)
	return fmt.Errorf("%w: %w", ErrSync, cause)
}
