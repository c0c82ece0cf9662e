package staging

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// OS is the file system of the operating system.
func OS() FS { return osFS{} }

type osFS struct{}

func pathError(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}

func linkError(op, oldname, newname string, err error) error {
	if err == nil {
		return nil
	}
	return &os.LinkError{Op: op, Old: oldname, New: newname, Err: err}
}

func (osFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	fd, err := open(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return newOSFile(fd, name, flag&unix.O_DIRECT != 0), nil
}

func open(name string, flag int, perm fs.FileMode) (fd int, err error) {
	err = retry(func() (err error) {
		fd, err = unix.Open(name, flag|unix.O_CLOEXEC, uint32(perm.Perm()))
		return err
	})
	return fd, pathError("open", name, err)
}

func (osFS) Rename(oldname, newname string) error {
	return renames.replace(byPath(oldname), byPath(newname), oldname, newname)
}

func (osFS) RenameNoReplace(oldname, newname string) error {
	return renames.noReplace(byPath(oldname), byPath(newname), oldname, newname)
}

func (osFS) Link(oldname, newname string) error {
	return linkError("link", oldname, newname, retry(func() error { return unix.Link(oldname, newname) }))
}

func (osFS) Remove(name string) error { return os.Remove(name) }

func (osFS) Mkdir(name string, perm fs.FileMode) error { return os.Mkdir(name, perm) }

func (osFS) MkdirAll(name string, perm fs.FileMode) error { return os.MkdirAll(name, perm) }

func (osFS) ReadDir(name string) ([]fs.DirEntry, error) { return os.ReadDir(name) }

func (osFS) Stat(name string) (Info, error) {
	var st unix.Stat_t
	if err := retry(func() error { return unix.Stat(name, &st) }); err != nil {
		return Info{}, pathError("stat", name, err)
	}
	return infoOf(&st), nil
}

func (osFS) SyncDir(name string) error { return syncPath(name, unix.O_DIRECTORY, "fsync", unix.Fsync) }

func (osFS) SyncFS(name string) error { return syncPath(name, 0, "syncfs", unix.Syncfs) }

func syncPath(name string, flag int, op string, do func(fd int) error) error {
	fd, err := open(name, unix.O_RDONLY|flag, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return pathError(op, name, retry(func() error { return do(fd) }))
}

func (osFS) Statfs(name string) (Space, error) {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Statfs(name, &st) }); err != nil {
		return Space{}, pathError("statfs", name, err)
	}
	return spaceOf(name, &st)
}

func spaceOf(name string, st *unix.Statfs_t) (s Space, err error) {
	unit := int64(st.Frsize)
	if unit == 0 {
		unit = int64(st.Bsize)
	}
	if st.Blocks == 0 {
		err = pathError("statfs", name, ErrNoSize)
	}
	return Space{
		Total: int64(st.Blocks) * unit, Free: int64(st.Bfree) * unit, Available: int64(st.Bavail) * unit,
		Type: int64(st.Type), ReadOnly: st.Flags&unix.ST_RDONLY != 0,
	}, err
}

// Lock implements [FS]. It writes the process id into the file, for the error message of others.
func (osFS) Lock(name string) (io.Closer, error) {
	fd, err := open(name, unix.O_RDWR|unix.O_CREAT, 0o600)
	if errors.Is(err, unix.EISDIR) {
		if fd, err = open(name, unix.O_RDONLY|unix.O_DIRECTORY, 0); err == nil {
			return lockDirectory(newOSFile(fd, name, false))
		}
	}
	if err != nil {
		return nil, err
	}
	return lockFile(newOSFile(fd, name, false))
}

// LockFile locks an open file until it is closed, exclusively or, with [unix.LOCK_SH], shared. It does not wait: the
// error is [ErrLocked]. A file that cannot be locked is left unlocked, without an error.
func LockFile(f File, how int) error {
	lock := func() error {
		if f.Fd() != NoFd && retry(func() error { return unix.Flock(int(f.Fd()), how|unix.LOCK_NB) }) == unix.EWOULDBLOCK {
			return fmt.Errorf("%w: %s", ErrLocked, f.Name())
		}
		return nil
	}
	if w, watched := f.(*watchedFile); watched { // the server of a network file system may not answer
		return w.fs.call(Call{Op: OpLock, Name: f.Name(), Do: lock})
	}
	return lock()
}

// lockFile locks an open file, and closes it when that fails.
func lockFile(f *osFile) (io.Closer, error) {
	err := retry(func() error { return unix.Flock(f.fd, unix.LOCK_EX|unix.LOCK_NB) })
	if err == unix.EWOULDBLOCK {
		defer f.Close()
		return nil, fmt.Errorf("%w: %s%s", ErrLocked, f.name, holder(f))
	}
	if err != nil {
		f.Close()
		return nil, pathError("flock", f.name, err)
	}
	text := strconv.Itoa(os.Getpid()) + "\n"
	if unix.Ftruncate(f.fd, 0) == nil {
		_, _ = f.WriteAt([]byte(text), 0) // ignored: the lock is also held on a full disk
	}
	return f, nil
}

// lockDirectory locks an open directory, and closes it when that fails. If the file system cannot lock directories, as
// over NFS, nothing is locked.
func lockDirectory(f *osFile) (io.Closer, error) {
	switch err := retry(func() error { return unix.Flock(f.fd, unix.LOCK_EX|unix.LOCK_NB) }); err {
	case nil, unix.EBADF, unix.ENOLCK, unix.ENOSYS, unix.EOPNOTSUPP, unix.EINVAL:
		return f, nil
	case unix.EWOULDBLOCK:
		return nil, errors.Join(fmt.Errorf("%w: the directory %s", ErrLocked, f.name), f.Close())
	default:
		return nil, errors.Join(pathError("flock", f.name, err), f.Close())
	}
}

func holder(f *osFile) string {
	var b [32]byte
	n, _ := f.ReadAt(b[:], 0)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n])))
	if err != nil {
		return ""
	}
	return fmt.Sprintf(" (process %d)", pid)
}

func infoOf(st *unix.Stat_t) Info {
	return Info{
		Size: st.Size, Allocated: st.Blocks * 512,
		ModTime: time.Unix(st.Mtim.Unix()), Dev: uint64(st.Dev), Ino: st.Ino, Links: uint64(st.Nlink),
		Owner: st.Uid, Mode: modeOf(st.Mode),
	}
}

func modeOf(m uint32) fs.FileMode {
	mode := fs.FileMode(m & 0o777)
	switch m & unix.S_IFMT {
	case unix.S_IFDIR:
		mode |= fs.ModeDir
	case unix.S_IFLNK:
		mode |= fs.ModeSymlink
	case unix.S_IFIFO:
		mode |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		mode |= fs.ModeSocket
	case unix.S_IFCHR:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFBLK:
		mode |= fs.ModeDevice
	}
	return mode
}
