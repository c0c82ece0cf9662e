package s3fs

import (
	"fmt"
	"io"
	"io/fs"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// leastHead is the least of an object that the request which opens it brings, so that it need not be read by another one: what
// pieces have before their payload. Where more was read at first of another object, it brings as much.
const leastHead = 64 << 10

// smallBytes is the most that stays in memory of a file that is open: there may be thousands.
const smallBytes = 16 << 10

// object is a version of an object, open for reading.
type object struct {
	fs   *FS
	name string
	key  string
	at   version
	over atomic.Bool

	mu   sync.Mutex
	head []byte // its first bytes, for the first read
}

func (f *FS) openObject(name string) (staging.File, error) {
	o := &object{fs: f, name: name, key: f.key(name)}
	head := f.memory.take(min(max(leastHead, int(f.first.Load())), f.cfg.Part))
	n, at, err := f.get(o.key, "", head, 0)
	if err != nil && errnoOf(err, false) == unix.ESTALE { // no range of an empty object can be had
		at, err = f.client.head(o.key)
	}
	if err != nil {
		f.memory.give(head)
		return nil, failed("open", name, err, false)
	}
	o.at, o.head = at, head[:n]
	return o, nil
}

// Name implements [staging.File].
func (o *object) Name() string { return o.name }

// Direct implements [staging.File].
func (o *object) Direct() bool { return false }

// Fd implements [staging.File].
func (o *object) Fd() uintptr { return staging.NoFd }

// ReadAt implements [staging.File].
func (o *object) ReadAt(p []byte, off int64) (n int, err error) {
	if err := o.usable("read"); err != nil {
		return 0, err
	}
	switch {
	case off < 0:
		return 0, pathError("read", o.name, fmt.Errorf("offset %d: %w", off, unix.EINVAL))
	case len(p) == 0:
		return 0, nil
	case off >= o.at.size:
		return 0, io.EOF
	}
	short := error(nil)
	if int64(len(p)) > o.at.size-off {
		p, short = p[:o.at.size-off], io.EOF
	}
	o.mu.Lock()
	if off < int64(len(o.head)) {
		n = copy(p, o.head[off:])
	}
	if o.head != nil && o.at.size > smallBytes {
		o.fs.first.Store(off + int64(len(p)))
		o.drop()
	}
	o.mu.Unlock()
	if n < len(p) {
		m, _, err := o.fs.get(o.key, o.at.etag, p[n:], off+int64(n))
		if n += m; err != nil {
			return n, failed("read", o.name, err, false)
		}
	}
	return n, short
}

// drop gives the head up. The caller holds mu.
func (o *object) drop() {
	o.fs.memory.give(o.head)
	o.head = nil
}

func (o *object) usable(op string) error {
	if o.over.Load() {
		return pathError(op, o.name, fs.ErrClosed)
	}
	return nil
}

// WriteAt implements [staging.File].
func (o *object) WriteAt([]byte, int64) (int, error) {
	if err := o.usable("write"); err != nil {
		return 0, err
	}
	return 0, pathError("write", o.name, unix.EBADF)
}

// Datasync implements [staging.File].
func (o *object) Datasync() error { return o.usable("fdatasync") }

// Allocate implements [staging.File].
func (o *object) Allocate(int64) error {
	if err := o.usable("allocate"); err != nil {
		return err
	}
	return pathError("allocate", o.name, unix.EBADF)
}

// Stat implements [staging.File].
func (o *object) Stat() (staging.Info, error) {
	if err := o.usable("stat"); err != nil {
		return staging.Info{}, err
	}
	return o.fs.info(o.at), nil
}

// Close implements [staging.File].
func (o *object) Close() error {
	if o.over.Swap(true) {
		return pathError("close", o.name, fs.ErrClosed)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drop()
	return nil
}
