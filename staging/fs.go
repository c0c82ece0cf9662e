package staging

import (
	"io"
	"io/fs"
	"time"
)

// FS is every operation on files that the host makes. Errors wrap the errno ([errors.Is] with unix.ENOSPC, or with
// [fs.ErrNotExist]) in an [fs.PathError]. No operation takes a context: a system call cannot be interrupted, so who
// needs a deadline runs it on [Workers] and stops waiting.
//
// An FS is safe for concurrent use.
type FS interface {
	// OpenFile opens with os.O_* flags; unix.O_DIRECT among them gives a direct file. Descriptors are close-on-exec.
	OpenFile(name string, flag int, perm fs.FileMode) (File, error)
	// Rename replaces what is at newname.
	Rename(oldname, newname string) error
	// RenameNoReplace fails with fs.ErrExist when newname exists, and leaves both as they are. Where the file system
	// has no such rename it is made of link and unlink, and where it has no link of a look and a rename, which is the
	// only form that another writer can race.
	RenameNoReplace(oldname, newname string) error
	Link(oldname, newname string) error
	// Remove unlinks a file or an empty directory.
	Remove(name string) error
	Mkdir(name string, perm fs.FileMode) error
	MkdirAll(name string, perm fs.FileMode) error
	// ReadDir lists a directory sorted by name.
	ReadDir(name string) ([]fs.DirEntry, error)
	// Stat follows symbolic links.
	Stat(name string) (Info, error)
	// SyncDir makes the names in a directory durable.
	SyncDir(name string) error
	// SyncFS makes durable all that was written to the file system that holds name: one flush for many files.
	SyncFS(name string) error
	Statfs(name string) (Space, error)
	// Lock takes the exclusive lock on the file name, made if missing, without waiting: [ErrLocked] when another has
	// it. Closing the result, or the end of the process, gives it back; the file stays.
	Lock(name string) (io.Closer, error)
}

// File is an open file. All of it is safe for concurrent use, Close included: an operation under way keeps the
// descriptor until it returns, and later ones fail with fs.ErrClosed.
type File interface {
	// ReadAt fills p or says why not; at the end of the file the error is io.EOF, whether or not bytes came first.
	io.ReaderAt
	// WriteAt writes all of p or says why not.
	io.WriterAt
	// Datasync makes the bytes, and the size, durable. After a failure the file's content on disk is unknown: asking
	// again proves nothing.
	Datasync() error
	Stat() (Info, error)
	// Name is the name it was opened by.
	Name() string
	// Direct says that I/O goes past the page cache and must be aligned to [Align]: address, length and offset.
	Direct() bool
	// Fd is the descriptor, for calls that this interface lacks. It is valid until Close.
	Fd() uintptr
	// Allocate reserves blocks for the first n bytes, and makes the file that long. A file system that cannot reserve
	// is no error; a full one is.
	Allocate(n int64) error
	Close() error
}

// Align is what addresses, lengths and offsets of direct I/O must be multiples of. Devices of 512-byte sectors would
// take less; what runs on those then fails on the others.
const Align = 4096

// Info is what a file is.
type Info struct {
	Size      int64
	Allocated int64 // bytes of blocks it holds, which is what the disk loses
	ModTime   time.Time
	Accessed  time.Time // last read, as exactly as the mount keeps it
	Dev, Ino  uint64    // identity
	Links     uint64    // names it has; 0 when unlinked and only open
	Mode      fs.FileMode
}

// IsDir says that it is a directory.
func (i Info) IsDir() bool { return i.Mode.IsDir() }

// Same says that two infos are of one file.
func (i Info) Same(o Info) bool { return i.Dev == o.Dev && i.Ino == o.Ino }

// Space is what a file system has.
type Space struct {
	Total     int64 // bytes
	Free      int64 // bytes not in use
	Available int64 // bytes that this user may still take
	Files     int64 // inodes; 0 where they are not counted
	FilesFree int64
	Type      int64 // the file system's magic number
	ReadOnly  bool
}
