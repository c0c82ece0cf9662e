package files

import (
	"fmt"
	"os"
	"path/filepath"
)

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

// SyncBytes makes the bytes of a file durable that somebody else has written: a host, perhaps, that syncs nothing.
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
