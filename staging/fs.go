package staging

import (
	"errors"
	"io"
	"io/fs"
	"strings"
	"time"
)

// FS is all file operations of the host. Errors wrap the errno ([errors.Is] with unix.ENOSPC, or with [fs.ErrNotExist])
// in an [fs.PathError]. No operation takes a context: a system call cannot be interrupted, so a caller that needs a
// deadline runs it on [Workers] and stops waiting.
//
// An FS is safe for concurrent use.
type FS interface {
	// OpenFile opens with os.O_* flags; unix.O_DIRECT among them gives a direct file. Descriptors are close-on-exec.
	OpenFile(name string, flag int, perm fs.FileMode) (File, error)
	// Rename replaces the file at newname.
	Rename(oldname, newname string) error
	// RenameNoReplace returns fs.ErrExist if newname exists, and leaves both files unchanged. On a file system without
	// such a rename it uses link and unlink. Without links it uses a stat and a rename, which can race with another
	// writer.
	RenameNoReplace(oldname, newname string) error
	Link(oldname, newname string) error
	// Remove unlinks a file or an empty directory.
	Remove(name string) error
	Mkdir(name string, perm fs.FileMode) error
	MkdirAll(name string, perm fs.FileMode) error
	// ReadDir lists a directory sorted by name.
	ReadDir(name string) ([]fs.DirEntry, error)
	// Stat follows symbolic links, except in an FS that follows none.
	Stat(name string) (Info, error)
	// SyncDir makes the names in a directory durable.
	SyncDir(name string) error
	// SyncFS makes everything written to the file system of name durable: one flush for many files.
	SyncFS(name string) error
	// Statfs returns [ErrNoSize] if the file system reports no size. Type is set in this case, too.
	Statfs(name string) (Space, error)
	// Lock takes the exclusive lock on a file, which it creates if missing. It does not wait: the error is [ErrLocked]
	// if another process holds the lock. Closing the result, or the end of the process, releases the lock, and the file
	// remains. A directory of [Below] can be locked in the same way.
	Lock(name string) (io.Closer, error)
}

// File is an open file. All methods are safe for concurrent use, including Close: an operation in progress keeps the
// descriptor until it returns, and later ones fail with fs.ErrClosed.
type File interface {
	// ReadAt fills p or returns an error: io.EOF at the end of the file, with or without bytes before it.
	io.ReaderAt
	// WriteAt writes all of p or returns an error.
	io.WriterAt
	// Datasync makes the bytes, and the size, durable. After a failure the file's content on disk is unknown, and a
	// second call proves nothing.
	Datasync() error
	Stat() (Info, error)
	// Name returns the name with which the file was opened.
	Name() string
	// Direct reports whether I/O bypasses the page cache. If so, address, length and offset must be multiples of
	// [Align].
	Direct() bool
	// Fd is the descriptor, for system calls that this interface lacks. It is valid until Close. A file that the
	// operating system does not have returns [NoFd].
	Fd() uintptr
	// Allocate reserves blocks for the first n bytes, and makes the file that long. It succeeds on a file system that
	// cannot reserve, and fails on a full one.
	Allocate(n int64) error
	Close() error
}

// NoFd is the result of [File.Fd] for a file without a descriptor.
const NoFd = ^uintptr(0)

// Align is the alignment of addresses, lengths and offsets of direct I/O. Devices with 512-byte sectors accept less,
// but code that relies on that fails on others.
const Align = 4096

// Info describes a file.
type Info struct {
	Size      int64
	Allocated int64 // bytes of the file's blocks on disk
	ModTime   time.Time
	Dev, Ino  uint64 // identity
	Links     uint64 // number of names; 0 if the file is unlinked but still open
	Owner     uint32 // user id
	Mode      fs.FileMode
}

// IsDir reports whether it is a directory.
func (i Info) IsDir() bool { return i.Mode.IsDir() }

// Same reports whether two infos describe the same file.
func (i Info) Same(o Info) bool { return i.Dev == o.Dev && i.Ino == o.Ino }

// Entry returns the info as a directory entry with a name.
func (i Info) Entry(name string) fs.DirEntry { return fs.FileInfoToDirEntry(named{name, i}) }

// named is an Info as an [fs.FileInfo].
type named struct {
	name string
	Info
}

func (n named) Name() string       { return n.name }
func (n named) Size() int64        { return n.Info.Size }
func (n named) Mode() fs.FileMode  { return n.Info.Mode }
func (n named) ModTime() time.Time { return n.Info.ModTime }
func (n named) Sys() any           { return nil }

// Space describes the space of a file system.
type Space struct {
	Total     int64 // bytes
	Free      int64 // bytes not in use
	Available int64 // bytes available to this user now
	Type      int64 // the file system's magic number
	ReadOnly  bool
}

// Op names operations of [FS] and [File]. Ops are bits: a value can name several.
type Op uint32

// The operations.
const (
	OpOpen Op = 1 << iota
	OpDirect
	OpRead
	OpWrite
	OpSync
	OpAllocate
	OpClose
	OpRename
	OpPublish
	OpLink
	OpRemove
	OpMkdir
	OpReadDir
	OpStat
	OpSyncDir
	OpSyncFS
	OpStatfs
	OpLock

	OpAny = OpLock<<1 - 1
)

// opNames are the names of the operations, in the order of the bits.
var opNames = [...]string{
	"open", "direct", "read", "write", "sync", "allocate", "close", "rename", "publish", "link", "remove", "mkdir",
	"readdir", "stat", "syncdir", "syncfs", "statfs", "lock",
}

func (o Op) String() string {
	if o&OpAny == OpAny {
		return "any"
	}
	var words []string
	for i, name := range opNames {
		if o&(1<<i) != 0 {
			words = append(words, name)
		}
	}
	return strings.Join(words, ",")
}

// OnRemove returns fsys with a function that gets the identity of every file that fsys removes. It is for caches of
// descriptors, since the blocks of a file are freed only when no descriptor is open. Removals by other programs are not
// reported.
func OnRemove(fsys FS, told func(dev, ino uint64)) FS {
	return removeFS{FS: fsys, known: directModesOf(fsys), told: told}
}

type removeFS struct {
	FS
	known *DirectModes
	told  func(dev, ino uint64)
}

// DirectModes implements [DirectModer].
func (r removeFS) DirectModes() *DirectModes { return r.known }

// Device implements [placed].
func (r removeFS) Device(name string) (uint64, error) { return deviceOf(r.FS, name) }

func (r removeFS) Remove(name string) error {
	info, err := r.FS.Stat(name)
	if removed := r.FS.Remove(name); removed != nil {
		return removed
	}
	if err == nil && !info.IsDir() {
		r.told(info.Dev, info.Ino)
	}
	return nil
}

// Files.
var (
	// ErrAlign means that I/O on a direct file was not aligned; an [AlignError] has the details.
	ErrAlign = errors.New("staging: not aligned for direct I/O")
	// ErrLocked means that another process, or another part of this one, holds the lock.
	ErrLocked = errors.New("staging: locked by another")
	// ErrOutside means that a name is not below the directories of an FS.
	ErrOutside = errors.New("staging: outside the directory")
	// ErrForeign means that a directory has the mark of another walk's directory.
	ErrForeign = errors.New("staging: the directory belongs to another")
	// ErrNotRegular means that the name of a file belongs to a directory, link, pipe, socket or device.
	ErrNotRegular = errors.New("staging: not a regular file")
	// ErrNoSize means that a file system, for example ramfs, reports no blocks.
	ErrNoSize = errors.New("staging: the file system states no size")
	// ErrLinked means that a file to be written has several names.
	ErrLinked = errors.New("staging: the file has several names")
	// ErrKernel means that the kernel, or a sandbox around the process, has no openat2, which opens files below a
	// directory only.
	ErrKernel = errors.New("staging: no openat2: want Linux 5.6 or newer, and a sandbox that lets it through")
	// ErrHung means that an operation exceeded its time limit and was abandoned; a [HungError] names it.
	ErrHung = errors.New("staging: no answer")
)

// Memory and workers.
var (
	// ErrClosed means that the pool was closed.
	ErrClosed = errors.New("staging: closed")
	// ErrSlotsOut means that the pool was closed while slots were in use. Its memory is released with the last of them.
	ErrSlotsOut = errors.New("staging: slots still out")
)
