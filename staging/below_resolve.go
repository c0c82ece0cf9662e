package staging

import (
	"io"
	"io/fs"
	"path"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// top is one of the directories of [Below].
type top struct {
	path string // clean
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
	// An FS has no end of its own.
	runtime.AddCleanup(t, func(now *atomic.Pointer[openDir]) {
		if dir := now.Load(); dir != nil {
			_ = dir.Close()
		}
	}, t.now)
	return t
}

// enter gives the directory, open, and the caller leaves it.
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

// reopen opens what is at the path now, which may lead through links.
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

// seen is told what is at the path. The next operation is in that directory, unless another one is locked.
func (t *top) seen(info *Info) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if dir := t.now.Load(); dir != nil && !dir.locked && (dir.dev != info.Dev || dir.ino != info.Ino) {
		t.now.Store(nil)
		_ = dir.Close()
	}
}

// lock opens what is at the path now and locks it.
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
	if old := t.now.Swap(dir); old != nil && !old.locked { // who has locked the old one closes it
		_ = old.Close()
	}
	return &topLock{t, dir}, nil
}

// topLock is the lock on a directory.
type topLock struct {
	top *top
	dir *openDir
}

// Close implements [io.Closer].
func (l *topLock) Close() error {
	l.top.now.CompareAndSwap(l.dir, nil)
	return l.dir.Close()
}

// resolution is what must not happen on the way to a name.
const resolution = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// openBelow opens a file below a directory. ELOOP says that it is a link, ENOTDIR that the way to it leads through one.
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
