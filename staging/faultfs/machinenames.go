package faultfs

import (
	"errors"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/kvhost/kvhost/staging"
)

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
	err := v.begin(staging.OpRemove, name)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	return v.remove(name)
}

// Rename implements [staging.FS]. It is one change: after a crash a replaced file is the old one or the new one.
func (v *Machine) Rename(oldname, newname string) error {
	err := v.begin(staging.OpRename, oldname)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
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
	err := v.begin(staging.OpPublish, oldname)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	if err := v.inner.RenameNoReplace(oldname, newname); err != nil {
		return err
	}
	v.changed(nil, func() error { return v.inner.Rename(newname, oldname) }, filepath.Dir(oldname), filepath.Dir(newname))
	return nil
}

// Link implements [staging.FS].
func (v *Machine) Link(oldname, newname string) error {
	err := v.begin(staging.OpLink, oldname)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
	if err := v.inner.Link(oldname, newname); err != nil {
		return err
	}
	v.changed(nil, func() error { return v.inner.Remove(newname) }, filepath.Dir(newname))
	return nil
}

// Mkdir implements [staging.FS].
func (v *Machine) Mkdir(name string, perm fs.FileMode) error {
	err := v.begin(staging.OpMkdir, name)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
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
	err := v.begin(staging.OpMkdir, name)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
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
	err := v.begin(staging.OpSyncDir, name)
	defer v.mu.Unlock()
	if err != nil {
		return err
	}
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
