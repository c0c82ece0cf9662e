package staging

import "golang.org/x/sys/unix"

// renamer is the system calls of publication, so that a test can replace some by failures.
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

// replace renames over an existing file.
func (r *renamer) replace(oldname, newname string) error {
	was, known := r.identity(oldname)
	err := retry(func() error { return r.rename(oldname, newname) })
	if err != nil && known && r.moved(was, oldname, newname) {
		err = nil
	}
	return linkError("rename", oldname, newname, err)
}

// noReplace tries the ways to publish a name until the file system supports one.
func (r *renamer) noReplace(oldname, newname string) error {
	was, known := r.identity(oldname)
	err := retry(func() error { return r.renameat2(oldname, newname, unix.RENAME_NOREPLACE) })
	switch err {
	case unix.EINVAL, unix.ENOSYS, unix.EOPNOTSUPP: // not supported, as on NFS, Ceph and Lustre
		err = r.linkUnlink(was, oldname, newname)
	}
	if err != nil && known && r.moved(was, oldname, newname) {
		err = nil
	}
	return linkError("rename", oldname, newname, err)
}

func (r *renamer) linkUnlink(was identity, oldname, newname string) error {
	err := retry(func() error { return r.link(oldname, newname) })
	switch err {
	case nil:
	case unix.EPERM, unix.EOPNOTSUPP, unix.ENOSYS, unix.EMLINK:
		return r.lookRename(oldname, newname)
	default:
		if now, ok := r.identity(newname); !ok || now != was {
			return err
		}
		// The link was made and the reply lost.
	}
	// Published. If the old name cannot be removed, the sweep of temporaries removes it later.
	_ = retry(func() error { return r.unlink(oldname) })
	return nil
}

func (r *renamer) lookRename(oldname, newname string) error {
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

// moved reports whether a rename that returned an error happened anyway, as on a network file system whose reply was
// lost: the new name is the old file, and the old name is gone.
func (r *renamer) moved(was identity, oldname, newname string) bool {
	now, ok := r.identity(newname)
	if !ok || now != was {
		return false
	}
	var st unix.Stat_t
	return retry(func() error { return r.lstat(oldname, &st) }) == unix.ENOENT
}
