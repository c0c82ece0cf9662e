package s3fs

import (
	"fmt"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// upload is a file that is being written. It holds the first part, which is kept to the end, and the part that is being filled.
// The parts between them have been sent.
type upload struct {
	fs   *FS
	name string
	id   uint64
	key  string // future key of the object

	mu       sync.Mutex
	first    []byte
	last     []byte // bytes after the sent parts
	size     int64
	multi    string // id of the multipart upload after its start
	sent     []minio.CompletePart
	modified time.Time
	failed   error // error of a part, after which the file is unusable
}

func (u *upload) stat() staging.Info {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.fs.info(version{size: u.size, id: u.id, modified: u.modified})
}

// writeAt implements [content]. It copies the bytes and sends each part that becomes full. Bytes after the first part must be written in
// order.
func (u *upload) writeAt(p []byte, off int64) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	part := int64(u.fs.cfg.Part)
	u.modified = time.Now()
	u.size = max(u.size, off+int64(len(p)))
	if off < part {
		n := min(int64(len(p)), part-off)
		u.first = u.fill(u.first, off, p[:n])
		p, off = p[n:], off+n
	}
	for len(p) > 0 && u.failed == nil {
		at := off - part*int64(1+len(u.sent))
		if at < 0 || at > int64(len(u.last)) || len(u.first) < u.fs.cfg.Part {
			return fmt.Errorf("%w: %d bytes at %d of %d", ErrOrder, len(p), off, u.size)
		}
		n := min(int64(len(p)), part-at)
		u.last = u.fill(u.last, at, p[:n])
		p, off = p[n:], off+n
		if len(u.last) == u.fs.cfg.Part {
			u.failed = u.send()
		}
	}
	return u.failed
}

// fill writes bytes at an offset of a buffer. If the buffer is too small, it grows to the needed size or to twice its size,
// whichever is larger, but by doubling at most to one part.
func (u *upload) fill(b []byte, off int64, p []byte) []byte {
	if end := int(off) + len(p); end > len(b) {
		if end > cap(b) {
			grown := u.fs.memory.take(max(end, min(2*cap(b), u.fs.cfg.Part)))
			copy(grown, b)
			grown = grown[:len(b)]
			u.fs.memory.give(b)
			b = grown
		}
		clear(b[len(b):end])
		b = b[:end]
	}
	copy(b[off:], p)
	return b
}

// send sends the part that is full.
func (u *upload) send() (err error) {
	if err = u.fs.mayWrite(u.key); err != nil {
		return err
	}
	if u.multi == "" {
		if u.multi, err = u.fs.start(u.key, u.id); err != nil {
			return err
		}
	}
	p, err := u.fs.part(u.key, u.multi, len(u.sent)+2, u.last)
	if err == nil {
		u.sent, u.last = append(u.sent, p), u.last[:0]
	}
	return err
}

// publish makes the file an object with a key. With absent set, there must be no object with the key.
func (u *upload) publish(key string, absent bool) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	when := condition{absent: absent && u.fs.conditional()}
	err := u.failed
	switch {
	case err != nil:
	case u.multi == "" && len(u.last) == 0:
		_, err = u.fs.put(key, u.id, u.first, when)
	case key != u.key: // the parts were sent for another key
		err = pathError("rename", u.name, unix.EXDEV)
	default:
		err = u.join(when)
	}
	if err == nil {
		u.release()
	}
	return err
}

// join sends the remaining parts and joins all parts to an object.
func (u *upload) join(when condition) error {
	if len(u.last) > 0 {
		if err := u.send(); err != nil {
			return err
		}
	}
	p, err := u.fs.part(u.key, u.multi, 1, u.first)
	if err == nil {
		_, err = u.fs.complete(u.key, u.multi, u.id, append([]minio.CompletePart{p}, u.sent...), when)
	}
	return err
}

// release returns the buffers to the pool. mu must be held.
func (u *upload) release() {
	u.fs.memory.give(u.first)
	u.fs.memory.give(u.last)
	u.first, u.last = nil, nil
}

// giveUp discards all bytes and cancels a multipart upload that has begun. If that fails, the next start cancels it.
func (u *upload) giveUp() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	multi := u.multi
	u.release()
	u.multi, u.sent, u.size = "", nil, 0
	if multi == "" {
		return nil
	}
	return u.fs.free.abort(u.key, multi)
}

// readAt implements [content] for bytes in parts that were not sent.
func (u *upload) readAt(p []byte, off int64) (n int, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if off < int64(len(u.first)) {
		n = copy(p, u.first[off:])
	}
	if n < len(p) {
		at := off + int64(n) - int64(u.fs.cfg.Part)*int64(1+len(u.sent))
		if at < 0 || at > int64(len(u.last)) {
			return n, ErrOrder
		}
		n += copy(p[n:], u.last[at:])
	}
	return n, nil
}

// closed implements [content]. The file stays until it is renamed or removed.
func (u *upload) closed() {}
