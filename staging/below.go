package staging

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Below is the operating system's file system, restricted to some directories and their contents. A name is resolved
// from a descriptor of its directory, without following a symbolic link, "..", or a link of /proc. So a writer to a
// directory cannot lead the process out of it. The operator chooses the paths of the directories themselves, which may
// lead through links. A name outside is [ErrOutside].
//
// OpenFile opens regular files only, and does not block; any other file is [ErrNotRegular]. A file with several names
// cannot be opened for writing, because another name may be outside. Stat, Remove and Rename act on a link itself.
//
// The directory at a path may be replaced, for example by a mount. Operations continue in the directory that [FS.Lock]
// locked or, without a lock, in the one of the last Stat.
func Below(dirs ...string) FS {
	b := &belowFS{}
	for _, dir := range dirs {
		b.tops = append(b.tops, newTop(path.Clean(dir)))
	}
	return b
}

type belowFS struct{ tops []*top }

// place is a path below an open directory. The path of the directory itself is ".".
type place struct {
	top *top
	dir *openDir
	rel string
}

func (p *place) leave() { p.dir.leave() }

// find returns the directory of a name, and the name's path below it.
func (b *belowFS) find(name string) (t *top, rel string, ok bool) {
	name = path.Clean(name)
	for _, t = range b.tops {
		if name == t.path {
			return t, ".", true
		}
		if len(name) > len(t.path) && strings.HasPrefix(name, t.path) && (t.path == "/" || name[len(t.path)] == '/') {
			return t, strings.TrimPrefix(name[len(t.path):], "/"), true
		}
	}
	return nil, "", false
}

// enter returns the place of a name, which the caller must leave.
func (b *belowFS) enter(op, name string) (place, error) {
	t, rel, ok := b.find(name)
	if !ok {
		return place{}, pathError(op, name, ErrOutside)
	}
	dir, err := t.enter()
	if err != nil {
		return place{}, pathError(op, name, err)
	}
	return place{t, dir, rel}, nil
}

// open opens the file at a place. It follows no link.
func (p *place) open(flag int, perm fs.FileMode) (fd int, err error) {
	return openBelow(p.dir.fd, p.rel, flag, perm)
}

// parent returns the descriptor of the directory that contains a place, and the place's name there.
func (p *place) parent() (at at, done func(), err error) {
	dir, base := path.Split(p.rel)
	switch {
	case p.rel == ".":
		return at, nil, unix.EBUSY
	case dir == "":
		at.dir, at.name = p.dir.fd, base
		return at, func() {}, nil
	}
	fd, err := openBelow(p.dir.fd, dir[:len(dir)-1], unix.O_PATH|unix.O_DIRECTORY, 0)
	at.dir, at.name = fd, base
	return at, func() { unix.Close(fd) }, err
}

// lstat describes the file at a place without opening it.
func (p *place) lstat(st *unix.Stat_t) error {
	fd, err := p.open(unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return retry(func() error { return unix.Fstat(fd, st) })
}

// irregular is the error of opening something that is not a regular file.
func irregular(mode uint32) error {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return fmt.Errorf("%w: %w", ErrNotRegular, unix.EISDIR)
	case unix.S_IFLNK:
		return fmt.Errorf("%w, but a symbolic link", ErrNotRegular)
	}
	return fmt.Errorf("%w, but a pipe, socket or device", ErrNotRegular)
}

// Device implements [placed].
func (b *belowFS) Device(name string) (dev uint64, err error) {
	p, err := b.enter("stat", name)
	if err != nil {
		return 0, err
	}
	defer p.leave()
	return p.dir.dev, nil
}

// DirectModes implements [DirectModer].
func (b *belowFS) DirectModes() *DirectModes { return &osModes }

func (b *belowFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	p, err := b.enter("open", name)
	if err != nil {
		return nil, err
	}
	defer p.leave()
	fd, err := p.openFile(flag, perm)
	if err != nil {
		return nil, pathError("open", name, err)
	}
	return newOSFile(fd, name, flag&unix.O_DIRECT != 0), nil
}

func (p *place) openFile(flag int, perm fs.FileMode) (fd int, err error) {
	const waitsForNobody = unix.O_NONBLOCK | unix.O_NOCTTY
	fd, err = p.open(flag&^unix.O_TRUNC|waitsForNobody, perm)
	var st unix.Stat_t
	switch err {
	case nil:
	case unix.ELOOP, unix.ENXIO, unix.ENODEV, unix.EISDIR: // the last three can also come from a failing device
		if p.lstat(&st) == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
			return -1, irregular(st.Mode)
		}
		return -1, err
	default:
		return -1, err
	}
	err = retry(func() error { return unix.Fstat(fd, &st) })
	writes := flag&(unix.O_WRONLY|unix.O_RDWR) != 0
	switch {
	case err != nil:
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		err = irregular(st.Mode)
	case writes && st.Nlink > 1:
		err = fmt.Errorf("%w: %d", ErrLinked, st.Nlink)
	case flag&unix.O_TRUNC != 0 && st.Size > 0:
		err = retry(func() error { return unix.Ftruncate(fd, 0) })
	}
	if err == nil { // cuFile refuses files with O_NONBLOCK
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flag&^unix.O_NONBLOCK)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// two enters the parents of two names.
func (b *belowFS) two(oldname, newname string, call func(from, to at) error) error {
	from, err := b.enter("rename", oldname)
	if err != nil {
		return err
	}
	defer from.leave()
	to, err := b.enter("rename", newname)
	if err != nil {
		return err
	}
	defer to.leave()
	fromAt, done, err := from.parent()
	if err == nil {
		defer done()
		if from.dir == to.dir && path.Dir(from.rel) == path.Dir(to.rel) { // for example a temporary and its target
			return call(fromAt, at{fromAt.dir, path.Base(to.rel)})
		}
		var toAt at
		if toAt, done, err = to.parent(); err == nil {
			defer done()
			return call(fromAt, toAt)
		}
	}
	return linkError("rename", oldname, newname, err)
}

func (b *belowFS) Rename(oldname, newname string) error {
	return b.two(oldname, newname, func(from, to at) error { return renames.replace(from, to, oldname, newname) })
}

func (b *belowFS) RenameNoReplace(oldname, newname string) error {
	return b.two(oldname, newname, func(from, to at) error { return renames.noReplace(from, to, oldname, newname) })
}

func (b *belowFS) Link(oldname, newname string) error {
	return b.two(oldname, newname, func(from, to at) error {
		return linkError("link", oldname, newname, retry(func() error { return renames.link(from, to) }))
	})
}

// inParent calls a function with the directory that contains a name.
func (b *belowFS) inParent(op, name string, call func(at) error) error {
	p, err := b.enter(op, name)
	if err != nil {
		return err
	}
	defer p.leave()
	at, done, err := p.parent()
	if err != nil {
		return pathError(op, name, err)
	}
	defer done()
	return pathError(op, name, call(at))
}

func (b *belowFS) Remove(name string) error {
	return b.inParent("remove", name, func(at at) error {
		err := retry(func() error { return unix.Unlinkat(at.dir, at.name, 0) })
		if err == unix.EISDIR || err == unix.EPERM {
			if derr := retry(func() error { return unix.Unlinkat(at.dir, at.name, unix.AT_REMOVEDIR) }); derr != unix.ENOTDIR {
				return derr
			}
		}
		return err
	})
}

func (b *belowFS) Mkdir(name string, perm fs.FileMode) error {
	if _, rel, ok := b.find(name); ok && rel == "." {
		return os.Mkdir(name, perm)
	}
	return b.inParent("mkdir", name, func(at at) error {
		return retry(func() error { return unix.Mkdirat(at.dir, at.name, uint32(perm.Perm())) })
	})
}

func (b *belowFS) MkdirAll(name string, perm fs.FileMode) error {
	if _, rel, ok := b.find(name); ok && rel == "." {
		return os.MkdirAll(name, perm)
	}
	p, err := b.enter("mkdir", name)
	if err != nil {
		return err
	}
	defer p.leave()
	return pathError("mkdir", name, p.mkdirAll(perm))
}

func (p *place) mkdirAll(perm fs.FileMode) error {
	fd, err := p.open(unix.O_PATH|unix.O_DIRECTORY, 0)
	if err == nil {
		return unix.Close(fd)
	}
	if err != unix.ENOENT {
		return err
	}
	above := place{p.top, p.dir, path.Dir(p.rel)}
	if above.rel != "." {
		if err := above.mkdirAll(perm); err != nil {
			return err
		}
	}
	at, done, err := p.parent()
	if err != nil {
		return err
	}
	defer done()
	err = retry(func() error { return unix.Mkdirat(at.dir, at.name, uint32(perm.Perm())) })
	if err != unix.EEXIST {
		return err
	}
	if fd, err = p.open(unix.O_PATH|unix.O_DIRECTORY, 0); err == nil { // another goroutine made it first
		err = unix.Close(fd)
	}
	return err
}

func (b *belowFS) ReadDir(name string) (list []fs.DirEntry, err error) {
	err = b.directory("open", name, func(fd int) error {
		dir := os.NewFile(uintptr(fd), name)
		defer dir.Close()
		list, err = dir.ReadDir(-1)
		return err
	})
	slices.SortFunc(list, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return list, err
}

// directory opens a directory for a function, which closes it.
func (b *belowFS) directory(op, name string, call func(fd int) error) error {
	p, err := b.enter(op, name)
	if err != nil {
		return err
	}
	defer p.leave()
	fd, err := p.open(unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return pathError(op, name, err)
	}
	return call(fd)
}

func (b *belowFS) Stat(name string) (Info, error) {
	t, rel, ok := b.find(name)
	if ok && rel == "." {
		info, err := osFS{}.Stat(name)
		if err == nil {
			t.seen(&info)
		}
		return info, err
	}
	p, err := b.enter("stat", name)
	if err != nil {
		return Info{}, err
	}
	defer p.leave()
	var st unix.Stat_t
	if err := p.lstat(&st); err != nil {
		return Info{}, pathError("stat", name, err)
	}
	return infoOf(&st), nil
}

// SyncDir implements [FS]. It also accepts the parent of a directory of [Below].
func (b *belowFS) SyncDir(name string) error {
	for _, t := range b.tops {
		if clean := path.Clean(name); clean == path.Dir(t.path) && clean != t.path {
			return osFS{}.SyncDir(name)
		}
	}
	return b.directory("fsync", name, func(fd int) error {
		defer unix.Close(fd)
		return pathError("fsync", name, retry(func() error { return unix.Fsync(fd) }))
	})
}

func (b *belowFS) SyncFS(name string) error {
	p, err := b.enter("syncfs", name)
	if err != nil {
		return err
	}
	defer p.leave()
	fd, err := p.open(unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return pathError("syncfs", name, err)
	}
	defer unix.Close(fd)
	return pathError("syncfs", name, retry(func() error { return unix.Syncfs(fd) }))
}

func (b *belowFS) Statfs(name string) (Space, error) {
	p, err := b.enter("statfs", name)
	if err != nil {
		return Space{}, err
	}
	defer p.leave()
	fd, err := p.open(unix.O_PATH, 0)
	if err != nil {
		return Space{}, pathError("statfs", name, err)
	}
	defer unix.Close(fd)
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(fd, &st) }); err != nil {
		return Space{}, pathError("statfs", name, err)
	}
	return spaceOf(name, &st)
}

func (b *belowFS) Lock(name string) (io.Closer, error) {
	t, rel, ok := b.find(name)
	if ok && rel == "." {
		return t.lock()
	}
	p, err := b.enter("lock", name)
	if err != nil {
		return nil, err
	}
	defer p.leave()
	for {
		fd, err := p.openFile(unix.O_RDWR|unix.O_CREAT, 0o600)
		if err != nil {
			return nil, pathError("lock", name, err)
		}
		f := newOSFile(fd, name, false)
		lock, err := lockFile(f)
		if err != nil {
			return nil, err
		}
		var st unix.Stat_t
		if info, err := f.Stat(); err == nil && p.lstat(&st) == nil && info.Same(infoOf(&st)) {
			return lock, nil
		}
		_ = lock.Close() // the name now leads to another file
	}
}

// top is one of the directories of [Below].
type top struct {
	path string // cleaned path
	mu   sync.Mutex
	now  *atomic.Pointer[openDir]
}

// openDir is the descriptor of a top.
type openDir struct {
	*osFile
	dev, ino uint64
	locked   bool
}

func newTop(path string) *top {
	t := &top{path: path, now: new(atomic.Pointer[openDir])}
	// An FS has no Close, so a cleanup closes the descriptor.
	runtime.AddCleanup(t, func(now *atomic.Pointer[openDir]) {
		if dir := now.Load(); dir != nil {
			_ = dir.Close()
		}
	}, t.now)
	return t
}

// enter returns the open directory, which the caller must leave.
func (t *top) enter() (*openDir, error) {
	if dir := t.now.Load(); dir != nil && dir.enter() {
		return dir, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if dir := t.now.Load(); dir != nil && dir.osFile.enter() {
		return dir, nil
	}
	dir, err := t.reopen()
	if err != nil {
		return nil, err
	}
	dir.enter()
	t.now.Store(dir)
	return dir, nil
}

// reopen opens the present directory at the path, which may lead through links.
func (t *top) reopen() (*openDir, error) {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Open(t.path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := retry(func() error { return unix.Fstat(fd, &st) }); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &openDir{osFile: newOSFile(fd, t.path, false), dev: uint64(st.Dev), ino: st.Ino}, nil
}

// seen records the directory that Stat found at the path. The next operation is in that directory, unless another one
// is locked.
func (t *top) seen(info *Info) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if dir := t.now.Load(); dir != nil && !dir.locked && (dir.dev != info.Dev || dir.ino != info.Ino) {
		t.now.Store(nil)
		_ = dir.Close()
	}
}

// lock opens the present directory at the path and locks it.
func (t *top) lock() (io.Closer, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	dir, err := t.reopen()
	if err != nil {
		return nil, pathError("lock", t.path, err)
	}
	if _, err := lockDirectory(dir.osFile); err != nil {
		return nil, err
	}
	dir.locked = true
	if old := t.now.Swap(dir); old != nil && !old.locked { // the holder of the old lock closes its directory
		_ = old.Close()
	}
	return &topLock{t, dir}, nil
}

// topLock is the lock on a directory.
type topLock struct {
	top *top
	dir *openDir
}

func (l *topLock) Close() error {
	l.top.now.CompareAndSwap(l.dir, nil)
	return l.dir.Close()
}

// resolution forbids links and escapes on the way to a name.
const resolution = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// openBelow opens a file below a directory. The error is ELOOP if the file is a link, and ENOTDIR if a directory on the
// way is one.
func openBelow(dir int, rel string, flag int, perm fs.FileMode) (fd int, err error) {
	how := unix.OpenHow{Flags: uint64(flag | unix.O_CLOEXEC), Resolve: resolution}
	if flag&unix.O_CREAT != 0 {
		how.Mode = uint64(perm.Perm())
	}
	for {
		switch fd, err = unix.Openat2(dir, rel, &how); err {
		case unix.EINTR, unix.EAGAIN:
			continue
		case unix.EXDEV:
			return -1, unix.ENOTDIR
		case unix.ENOSYS:
			return -1, ErrKernel
		case unix.ELOOP:
			if strings.Contains(rel, "/") {
				above, err := openBelow(dir, path.Dir(rel), unix.O_PATH|unix.O_DIRECTORY, 0)
				if err != nil {
					return -1, unix.ENOTDIR
				}
				unix.Close(above)
			}
			if flag&unix.O_DIRECTORY != 0 {
				return -1, unix.ENOTDIR
			}
		}
		return fd, err
	}
}
