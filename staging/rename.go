package staging

import "golang.org/x/sys/unix"

// at is a name in an open directory.
type at struct {
	dir  int
	name string
}

// byPath returns a name that the kernel resolves from the working directory.
func byPath(name string) at { return at{unix.AT_FDCWD, name} }

// renamer holds the system calls of publication, so that a test can replace some by failures.
type renamer struct {
	renameat2 func(from, to at, flags uint) error
	rename    func(from, to at) error
	link      func(from, to at) error
	unlink    func(at) error
	lstat     func(at at, st *unix.Stat_t) error
}

var renames = renamer{
	renameat2: func(from, to at, flags uint) error {
		return unix.Renameat2(from.dir, from.name, to.dir, to.name, flags)
	},
	rename: func(from, to at) error { return unix.Renameat(from.dir, from.name, to.dir, to.name) },
	link:   func(from, to at) error { return unix.Linkat(from.dir, from.name, to.dir, to.name, 0) },
	unlink: func(at at) error { return unix.Unlinkat(at.dir, at.name, 0) },
	lstat: func(at at, st *unix.Stat_t) error {
		return unix.Fstatat(at.dir, at.name, st, unix.AT_SYMLINK_NOFOLLOW)
	},
}

// replace renames over an existing file.
func (r *renamer) replace(from, to at, oldname, newname string) error {
	was, known := r.identity(from)
	err := retry(func() error { return r.rename(from, to) })
	if err != nil && known && r.moved(was, from, to) {
		err = nil
	}
	return linkError("rename", oldname, newname, err)
}

// noReplace tries the ways to publish a name until one is supported.
func (r *renamer) noReplace(from, to at, oldname, newname string) error {
	was, known := r.identity(from)
	err := retry(func() error { return r.renameat2(from, to, unix.RENAME_NOREPLACE) })
	switch err {
	case unix.EINVAL, unix.ENOSYS, unix.EOPNOTSUPP: // not supported, as on NFS, Ceph and Lustre
		err = r.linkUnlink(was, from, to)
	}
	if err != nil && known && r.moved(was, from, to) {
		err = nil
	}
	return linkError("rename", oldname, newname, err)
}

func (r *renamer) linkUnlink(was identity, from, to at) error {
	err := retry(func() error { return r.link(from, to) })
	switch err {
	case nil:
	case unix.EPERM, unix.EOPNOTSUPP, unix.ENOSYS, unix.EMLINK:
		return r.lookRename(from, to)
	default:
		if now, ok := r.identity(to); !ok || now != was {
			return err
		}
		// The link was made, and the reply was lost.
	}
	// Published. If the old name cannot be removed, the sweep of temporaries removes it later.
	_ = retry(func() error { return r.unlink(from) })
	return nil
}

func (r *renamer) lookRename(from, to at) error {
	var st unix.Stat_t
	switch err := retry(func() error { return r.lstat(to, &st) }); err {
	case nil:
		return unix.EEXIST
	case unix.ENOENT:
		return retry(func() error { return r.rename(from, to) })
	default:
		return err
	}
}

type identity struct{ dev, ino uint64 }

func (r *renamer) identity(at at) (identity, bool) {
	var st unix.Stat_t
	if retry(func() error { return r.lstat(at, &st) }) != nil {
		return identity{}, false
	}
	return identity{uint64(st.Dev), st.Ino}, true
}

// moved reports whether a rename that returned an error happened anyway, as on a network file system that lost the
// reply: the new name is the old file, and the old name is gone.
func (r *renamer) moved(was identity, from, to at) bool {
	now, ok := r.identity(to)
	if !ok || now != was {
		return false
	}
	var st unix.Stat_t
	return retry(func() error { return r.lstat(from, &st) }) == unix.ENOENT
}
