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

// maxMade is the maximum number of times that an operation creates its directory. The directory may be removed each time before
// it is used.
const maxMade = 4

// InDir runs an operation that creates the name. If the directory is missing, it creates the directory and tries again.
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

// OwnDirs declares that no other host uses the directories. From then on, empty directories are removed and existing ones are
// counted. It must be called before the Dir is used.
func (d *Dir) OwnDirs() { d.owned = true }

// Leave removes the directory of a removed file, and the directories above it, if they are empty. Each takes a block of the
// file system, and a place policy may create one for each piece. A put that finds its directory missing creates it again
// (InDir). If each piece has its own directory, that makes a put half as slow again, so directories within the tolerated part
// of the capacity stay. Shared directories stay as well, because older versions of the host may use them.
func (d *Dir) Leave(name string) {
	if !d.owned || !d.account.DirectoriesGo() || strings.HasPrefix(name[min(len(d.Slash), len(name)):], pieceformat.MetaDir+"/") {
		return
	}
	for dir := filepath.Dir(name); len(dir) > len(d.Path) && d.drop(dir); dir = filepath.Dir(dir) {
	}
}

// drop removes an empty directory. It excludes puts that make names durable, so that no put can rely on the name of a directory
// that is being removed.
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

// dirBytes is the assumed size of a directory: one block. A directory with many names takes more, but less than half of the
// tolerated bytes for each name.
const dirBytes = 4096

// make creates a directory and missing directories above it, and counts them.
func (d *Dir) make(dir string) error {
	d.settling.Lock()
	defer d.settling.Unlock()
	var missing []string
	for above := dir; len(above) > len(d.Path); above = filepath.Dir(above) {
		if _, err := d.FS.Stat(above); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		d.lasting.Delete(above) // the name is new and not durable
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
	booked  int64               // bytes in the account, which a new count replaces
	unread  map[string]struct{} // directories that have not been read; the count will find the directories inside them
	reading string              // directory that is being read
	changes map[string]bool     // directories created (true) or removed (false) in it during the reading
}

// changed updates the account for a directory that was created or removed, unless the running count will still find it.
// settling must be held.
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

// book adds more directories to the account. settling must be held.
func (d *Dir) book(more int64) {
	before := d.counting.booked
	d.counting.booked = max(0, before+more*dirBytes)
	d.account.Directories(d.counting.booked - before)
}

// CountDirs counts the existing directories after the root is opened, while others are created and removed. If the file system
// counts subdirectories as links to a directory, directories without any, which are nearly all, need not be read.
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

// read returns the subdirectories of a directory.
func (d *Dir) read(dir string) map[string]struct{} {
	inside := map[string]struct{}{}
	info, err := d.FS.Stat(dir)
	if err != nil || !info.IsDir() || info.Links == noneInside {
		return inside // removed in between, unreadable, or without subdirectories
	}
	list, err := d.FS.ReadDir(dir)
	if err != nil {
		return inside
	}
	for _, e := range list {
		if e.Name() == pieceformat.MetaDir && dir != d.Path {
			return map[string]struct{}{} // the directory is another root
		}
		if e.IsDir() {
			inside[dir+"/"+e.Name()] = struct{}{}
		}
	}
	return inside
}

// noneInside is the number of links of a directory without subdirectories: its name and its entry for itself.
const noneInside = 2

// maxLasting is the maximum number of directories that are remembered as durable.
const maxLasting = 1 << 16

// MakeDir creates a directory below the root. If names are made durable, it makes the names of all its levels durable.
func (d *Dir) MakeDir(dir string) error {
	if err := d.make(dir); err != nil || !d.strict {
		return err
	}
	d.settling.RLock()
	defer d.settling.RUnlock()
	return d.settle(dir)
}

// SyncBytes makes the bytes of a file durable. Another process has written it, which may be a host that syncs nothing.
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

// SyncName makes the names in a directory durable, and the names of the directories above it.
func (d *Dir) SyncName(dir string) error {
	if err := d.FS.SyncDir(dir); err != nil {
		return d.SyncFailed(err)
	}
	d.settling.RLock()
	defer d.settling.RUnlock()
	return d.settle(dir)
}

// settle makes the names of a directory and of those above it durable, unless this process has done so before. An existing
// directory may come from a process that was killed, or from a put that has not made it durable yet.
func (d *Dir) settle(dir string) error {
	for above := dir; len(above) > len(d.Path); above = filepath.Dir(above) {
		if _, ok := d.lasting.Load(above); ok {
			continue
		}
		if err := d.FS.SyncDir(filepath.Dir(above)); err != nil {
			return d.SyncFailed(err)
		}
		if d.lastingN.Add(1) > maxLasting { // bounds the memory: a place policy may create any number of directories
			d.ForgetDirs()
		}
		d.lasting.Store(above, struct{}{})
	}
	return nil
}

// ForgetDirs forgets which names are durable, for a root that was out of service.
func (d *Dir) ForgetDirs() {
	d.lasting.Clear()
	d.lastingN.Store(0)
}

// SyncFailed counts a failed sync and returns its error.
func (d *Dir) SyncFailed(cause error) error {
	d.SyncFails.Add(1)
	return fmt.Errorf("%w: %w", ErrSync, cause)
}
