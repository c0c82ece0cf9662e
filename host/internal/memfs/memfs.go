package memfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// ErrConfig means that the configuration is not valid.
var ErrConfig = errors.New("memfs: bad configuration")

// ErrOpen means that the file system was closed while files were open. Its memory stays mapped.
var ErrOpen = errors.New("memfs: files are still open")

// Magic is the file system type that Statfs returns.
const Magic = 0x6b766d66

// Usable returns the part of a file system's memory that files of any sizes can use. One part in 64 stays free, so that
// free runs are long, and at most 16 MiB are reserved for small files of the store itself.
func Usable(bytes int64) int64 { return (bytes - bytes/64 - min(16<<20, bytes/8)) &^ (page - 1) }

// devices numbers the file systems of this process.
var devices atomic.Uint64

// FS is a file system in memory, a [staging.FS]. It is safe for concurrent use.
type FS struct {
	arena *arena
	dev   uint64

	mu    sync.RWMutex
	root  *node
	inode uint64
	opens int // open files
}

// New creates an empty file system with the given bytes of memory, of which [Usable] can be used. No memory is
// page-locked before Start. log may be nil.
func New(bytes int64, log *slog.Logger) (*FS, error) {
	if bytes < page || bytes > 1<<46 {
		return nil, fmt.Errorf("%w: %d bytes of memory", ErrConfig, bytes)
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	a, err := newArena(bytes&^(page-1), log)
	if err != nil {
		return nil, err
	}
	f := &FS{arena: a, dev: 1<<63 | devices.Add(1)}
	f.root = f.newNode(fs.ModeDir | 0o700)
	f.root.links = 1
	return f, nil
}

// AsNeeded makes the memory grow as files need it, with a quarter of the whole kept free in advance. Growing in advance matters
// if the kernel must first compact memory into huge pages, because allocation is then slower than the stores that need it. This
// mode leaves more of the machine's memory to others, and continues when they release some. It must be called before Start.
func (f *FS) AsNeeded() {
	f.arena.ahead, f.arena.keep, f.arena.retry = max(f.arena.goal/4, f.arena.step), keepFreeAsNeeded, growthWait
}

// Yields sets a function that is called before each further step. It waits for work that page-locking would delay, because the driver does
// nothing else for a GPU in the meantime. It must be called before Start.
func (f *FS) Yields(to func()) { f.arena.yield = to }

// Start page-locks memory near NUMA nodes and registers it with pinners. The first step is ready when Start returns,
// and the others follow in the background. Without pinners the memory is allocated but not page-locked. It must be
// called once.
func (f *FS) Start(nodes []int, pinners ...staging.Pinner) { f.arena.start(nodes, pinners) }

// Grown returns a channel that is closed when all memory is page-locked or the machine has no more: see Stats. If memory grows
// as needed, a lack of memory does not close it.
func (f *FS) Grown() <-chan struct{} { return f.arena.ended }

// Unlock ends the growth and unregisters the memory from the pinners. The files remain.
func (f *FS) Unlock() error { return f.arena.unlock() }

// Close frees the memory with all files. It returns [ErrOpen] if a file is open.
func (f *FS) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.opens > 0 {
		return errors.Join(fmt.Errorf("%w: %d", ErrOpen, f.opens), f.arena.unlock())
	}
	return f.arena.close()
}

// Stats is the state of a file system's memory.
type Stats struct {
	Wanted int64         // bytes to allocate in all
	Ready  int64         // bytes that are allocated, and page-locked if there are pinners
	Used   int64         // bytes of files
	Pages  staging.Pages // kind of pages
	Short  error         // why Ready is less than Wanted; nil while the memory grows
}

func (f *FS) Stats() Stats {
	a := f.arena
	a.mu.Lock()
	defer a.mu.Unlock()
	return Stats{Wanted: a.goal, Ready: a.ready, Used: a.ready - a.pages.free*page, Pages: a.kind, Short: a.short}
}

func pathError(op, name string, err error) error { return &fs.PathError{Op: op, Path: name, Err: err} }

func linkError(op, oldname, newname string, err error) error {
	return &os.LinkError{Op: op, Old: oldname, New: newname, Err: err}
}

func (f *FS) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	if flag&unix.O_DIRECT != 0 {
		return nil, pathError("open", name, unix.EINVAL)
	}
	file, err := f.open(name, flag, perm)
	if err != nil {
		return nil, pathError("open", name, err)
	}
	if flag&os.O_TRUNC != 0 && file.writes {
		file.node.truncate(f.arena)
	}
	return file, nil
}

func (f *FS) open(name string, flag int, perm fs.FileMode) (*file, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, base, err := f.parent(name)
	if err != nil {
		return nil, err
	}
	n := dir.children[base]
	if base == "" {
		n = dir
	}
	switch {
	case n == nil && flag&os.O_CREATE == 0:
		return nil, unix.ENOENT
	case n == nil:
		n = f.newNode(perm.Perm())
		f.link(dir, base, n)
	case flag&(os.O_CREATE|os.O_EXCL) == os.O_CREATE|os.O_EXCL:
		return nil, unix.EEXIST
	case n.isDir():
		return nil, unix.EISDIR
	}
	n.opens++
	f.opens++
	o := &file{fs: f, node: n, name: name, writes: flag&(os.O_WRONLY|os.O_RDWR) != 0, reads: flag&os.O_WRONLY == 0}
	o.users.Store(1)
	return o, nil
}

// closed ends a file's reference to its node.
func (f *FS) closed(n *node) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n.opens--
	f.opens--
	f.reap(n)
}

// Rename implements [staging.FS]. Directories cannot be renamed.
func (f *FS) Rename(oldname, newname string) error { return f.rename(oldname, newname, true) }

func (f *FS) RenameNoReplace(oldname, newname string) error { return f.rename(oldname, newname, false) }

func (f *FS) rename(oldname, newname string, replace bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := func() error {
		from, old, err := f.parent(oldname)
		if err != nil {
			return err
		}
		n := from.children[old]
		if n == nil {
			return unix.ENOENT
		}
		to, base, err := f.parent(newname)
		switch there := to.child(base); {
		case err != nil:
			return err
		case n.isDir() || base == "":
			return unix.EPERM
		case there == n && replace:
			return nil
		case there != nil && !replace:
			return unix.EEXIST
		case there != nil && there.isDir():
			return unix.EISDIR
		case there != nil:
			f.unlink(to, base)
		}
		n.links++ // so that unlink does not free the file
		f.unlink(from, old)
		f.link(to, base, n)
		n.links--
		return nil
	}()
	if err != nil {
		return linkError("rename", oldname, newname, err)
	}
	return nil
}

func (f *FS) Link(oldname, newname string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.find(oldname)
	if err == nil && n.isDir() {
		err = unix.EPERM
	}
	if err == nil {
		var to *node
		var base string
		if to, base, err = f.parent(newname); err == nil {
			if to.child(base) != nil || base == "" {
				err = unix.EEXIST
			} else {
				f.link(to, base, n)
			}
		}
	}
	if err != nil {
		return linkError("link", oldname, newname, err)
	}
	return nil
}

func (f *FS) Remove(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, base, err := f.parent(name)
	switch n := dir.child(base); {
	case err != nil:
	case base == "":
		err = unix.EBUSY
	case n == nil:
		err = unix.ENOENT
	case n.isDir() && len(n.children) > 0:
		err = unix.ENOTEMPTY
	default:
		f.unlink(dir, base)
		return nil
	}
	return pathError("remove", name, err)
}

func (f *FS) Mkdir(name string, perm fs.FileMode) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, base, err := f.parent(name)
	if err == nil && (base == "" || dir.child(base) != nil) {
		err = unix.EEXIST
	}
	if err != nil {
		return pathError("mkdir", name, err)
	}
	f.link(dir, base, f.newNode(fs.ModeDir|perm.Perm()))
	return nil
}

func (f *FS) MkdirAll(name string, perm fs.FileMode) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir := f.root
	for rest := name; ; {
		var base string
		var err error
		if base, rest, err = component(rest); err != nil || base == "" {
			if err != nil {
				return pathError("mkdir", name, err)
			}
			return nil
		}
		next := dir.children[base]
		if next == nil {
			next = f.newNode(fs.ModeDir | perm.Perm())
			f.link(dir, base, next)
		}
		if !next.isDir() {
			return pathError("mkdir", name, unix.ENOTDIR)
		}
		dir = next
	}
}

func (f *FS) Stat(name string) (staging.Info, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	n, err := f.find(name)
	if err != nil {
		return staging.Info{}, pathError("stat", name, err)
	}
	return n.info(f.dev), nil
}

// SyncDir implements [staging.FS]. It does nothing, because no file outlives the process.
func (f *FS) SyncDir(name string) error {
	_, err := f.directory("fsync", name)
	return err
}

func (f *FS) SyncFS(name string) error {
	_, err := f.Stat(name)
	return err
}

func (f *FS) directory(op, name string) (*node, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	n, err := f.find(name)
	if err == nil && !n.isDir() {
		err = unix.ENOTDIR
	}
	if err != nil {
		return nil, pathError(op, name, err)
	}
	return n, nil
}

// Statfs implements [staging.FS]. The difference between free and available bytes is memory that is being allocated.
func (f *FS) Statfs(name string) (staging.Space, error) {
	if _, err := f.Stat(name); err != nil {
		return staging.Space{}, err
	}
	total, ready, free := f.arena.space()
	return staging.Space{Total: total, Free: total - ready + free, Available: free, Type: Magic}, nil
}

func (f *FS) Lock(name string) (io.Closer, error) {
	file, err := f.open(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err == unix.EISDIR {
		return f.lockDirectory(name)
	}
	if err != nil {
		return nil, pathError("lock", name, err)
	}
	if file.node.locked.Swap(true) {
		return nil, errors.Join(fmt.Errorf("%w: %s", staging.ErrLocked, name), file.Close())
	}
	return lock{file}, nil
}

func (f *FS) lockDirectory(name string) (io.Closer, error) {
	n, err := f.directory("lock", name)
	if err != nil {
		return nil, err
	}
	if n.locked.Swap(true) {
		return nil, fmt.Errorf("%w: %s", staging.ErrLocked, name)
	}
	return directoryLock{n}, nil
}

// directoryLock is the lock on a directory.
type directoryLock struct{ *node }

func (l directoryLock) Close() error {
	l.locked.Store(false)
	return nil
}

type lock struct{ *file }

func (l lock) Close() error {
	l.node.locked.Store(false)
	return l.file.Close()
}

// now returns the time of the file system.
func now() int64 { return time.Now().UnixNano() }

// node is a file or a directory. FS.mu guards it, except the content of a file.
type node struct {
	inode    uint64
	mode     fs.FileMode
	children map[string]*node // entries of a directory
	links    int              // number of names
	opens    int              // number of open files
	locked   atomic.Bool
	modified atomic.Int64 // nanoseconds

	content
}

func (f *FS) newNode(mode fs.FileMode) *node {
	f.inode++
	n := &node{inode: f.inode, mode: mode}
	if mode.IsDir() {
		n.children = map[string]*node{}
	}
	n.modified.Store(now())
	return n
}

func (n *node) isDir() bool { return n.children != nil }

// child returns the node with a name in a directory. n may be nil.
func (n *node) child(base string) *node {
	if n == nil {
		return nil
	}
	return n.children[base]
}

func (n *node) info(dev uint64) staging.Info {
	return staging.Info{Size: n.sized.Load(), Allocated: n.allocated.Load(), ModTime: time.Unix(0, n.modified.Load()),
		Dev: dev, Ino: n.inode, Links: uint64(n.links), Mode: n.mode}
}

const longestName = 255

// component splits the first component off a path. It is empty at the end of the path.
func component(path string) (base, rest string, err error) {
	for {
		path = strings.TrimLeft(path, "/")
		base, rest, _ = strings.Cut(path, "/")
		switch {
		case base == ".":
			path = rest
		case base == "..":
			return "", "", unix.EINVAL
		case len(base) > longestName:
			return "", "", unix.ENAMETOOLONG
		default:
			return base, rest, nil
		}
	}
}

// parent returns the directory of a name and the last component of the name. The component is empty for the top directory.
func (f *FS) parent(name string) (dir *node, base string, err error) {
	dir = f.root
	base, rest, err := component(name)
	for err == nil {
		var next string
		next, rest, err = component(rest)
		if err != nil || next == "" {
			break
		}
		below := dir.children[base]
		switch {
		case below == nil:
			return nil, "", unix.ENOENT
		case !below.isDir():
			return nil, "", unix.ENOTDIR
		}
		dir, base = below, next
	}
	if err != nil {
		return nil, "", err
	}
	return dir, base, nil
}

// find returns the node with a name.
func (f *FS) find(name string) (*node, error) {
	dir, base, err := f.parent(name)
	if err != nil {
		return nil, err
	}
	if base == "" {
		return dir, nil
	}
	if n := dir.children[base]; n != nil {
		return n, nil
	}
	return nil, unix.ENOENT
}

func (f *FS) link(dir *node, base string, n *node) {
	dir.children[base] = n
	dir.modified.Store(now())
	n.links++
}

func (f *FS) unlink(dir *node, base string) {
	n := dir.children[base]
	delete(dir.children, base)
	dir.modified.Store(now())
	n.links--
	f.reap(n)
}

// reap frees the memory of a file without names and open files.
func (f *FS) reap(n *node) {
	if n.links == 0 && n.opens == 0 && !n.isDir() {
		n.truncate(f.arena)
	}
}

func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	dir, err := f.directory("readdir", name)
	if err != nil {
		return nil, err
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	list := make([]fs.DirEntry, 0, len(dir.children))
	for base, n := range dir.children {
		list = append(list, n.info(f.dev).Entry(base))
	}
	slices.SortFunc(list, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return list, nil
}
