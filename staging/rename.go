package staging

import (
	"golang.org/x/sys/unix"
)

// renamer is the system calls that publication is made of, so that a test can have a file system that refuses some.
type renamer struct {
	renameat2 func(oldname, newname string, flags uint) error
	rename    func(oldname, newname string) error
	link      func(oldname, newname string) error
	unlink    func(name string) error
	lstat     func(name string, st *unix.Stat_t) error
}

var renames = renamer{
	renameat2: func(oldname, newname string, flags uint) error {
		return unix.Renameat2(unix.AT_FDCWD, oldname, unix.AT_FDCWD, newname, flags)
	},
	rename: unix.Rename,
	link:   unix.Link,
	unlink: unix.Unlink,
	lstat:  unix.Lstat,
}

// replace renames over what is there.
func (r *renamer) replace(oldname, newname string) error {
	before, known := r.identity(oldname)
	err := retry(func() error { return r.rename(oldname, newname) })
	if err != nil && known && r.moved(before, oldname, newname) {
		err = nil
	}
	return linkError("rename", oldname, newname, err)
}

// noReplace goes down the ways of publishing a name until the file system takes one.
func (r *renamer) noReplace(oldname, newname string) error {
	before, known := r.identity(oldname)
	err := retry(func() error { return r.renameat2(oldname, newname, unix.RENAME_NOREPLACE) })
	if refused(err) {
		err = r.linkUnlink(oldname, newname)
	}
	if err != nil && known && r.moved(before, oldname, newname) {
		err = nil
	}
	return linkError("rename", oldname, newname, err)
}

// refused says that the file system does not know the operation, rather than that it failed.
func refused(err error) bool {
	return err == unix.EINVAL || err == unix.ENOSYS || err == unix.EOPNOTSUPP
}

func (r *renamer) linkUnlink(oldname, newname string) error {
	switch err := retry(func() error { return r.link(oldname, newname) }); err {
	case nil:
		return retry(func() error { return r.unlink(oldname) })
	case unix.EPERM, unix.EOPNOTSUPP, unix.ENOSYS, unix.EMLINK:
	default:
		return err
	}
	var st unix.Stat_t
	switch err := retry(func() error { return r.lstat(newname, &st) }); err {
	case nil:
		return unix.EEXIST
	case unix.ENOENT:
		return retry(func() error { return r.rename(oldname, newname) })
	default:
		return err
	}
}

type identity struct{ dev, ino uint64 }

func (r *renamer) identity(name string) (identity, bool) {
	var st unix.Stat_t
	if retry(func() error { return r.lstat(name, &st) }) != nil {
		return identity{}, false
	}
	return identity{uint64(st.Dev), st.Ino}, true
}

// moved says that a rename which reported an error happened all the same, as it may on a network file system whose
// reply was lost: the new name is the old file, and the old name is gone.
func (r *renamer) moved(was identity, oldname, newname string) bool {
	now, ok := r.identity(newname)
	if !ok || now != was {
		return false
	}
	var st unix.Stat_t
	return retry(func() error { return r.lstat(oldname, &st) }) == unix.ENOENT
}
