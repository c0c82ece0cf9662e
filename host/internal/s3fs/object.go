package s3fs

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// leastHead is the least number of bytes that are read when an object is opened, so that the bytes before a piece's payload need no second
// request. If the first read of another object was longer, that many bytes are requested. Objects of at most leastHead bytes stay in memory
// while they are open, and there may be thousands of them.
const leastHead = 16 << 10

// object is a version of an object, open for reading.
type object struct {
	fs  *FS
	key string
	at  version

	mu   sync.Mutex
	head []byte  // first bytes, for the first read
	rest *stream // following bytes, also for the first read
}

func (f *FS) openObject(name string) (staging.File, error) {
	o := &object{fs: f, key: f.key(name)}
	head := make([]byte, leastHead)
	n, rest, at, err := f.open(o.key, head, min(max(leastHead, int(f.first.Load())), f.cfg.Part))
	if err != nil && errnoOf(err, false) == unix.ESTALE { // a request for a range of an empty object fails
		at, err = f.client.head(o.key)
	}
	if err != nil {
		return nil, failed("open", name, err, false)
	}
	o.at, o.head, o.rest = at, head[:n], rest
	return &file{content: o, name: name}, nil
}

func (o *object) stat() staging.Info { return o.fs.info(o.at) }

func (o *object) readAt(p []byte, off int64) (n int, err error) {
	o.mu.Lock()
	rest, at := o.rest, int64(len(o.head))
	if off < at {
		n = copy(p, o.head[off:])
	}
	if o.head != nil && o.at.size > leastHead {
		o.fs.first.Store(off + int64(len(p)))
		o.rest = nil
		o.drop()
	}
	o.mu.Unlock()
	if rest != nil {
		if n < len(p) && off+int64(n) == at {
			var m int
			m, _ = rest.read(p[n:]) // missing bytes are requested below
			n += m
		}
		rest.close()
	}
	if n < len(p) {
		var m int
		m, _, err = o.fs.get(o.key, o.at.etag, p[n:], off+int64(n))
		n += m
	}
	return n, err
}

func (o *object) writeAt([]byte, int64) error { return ErrOrder }

func (o *object) closed() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drop()
}

// drop frees the bytes for the first read. mu must be held.
func (o *object) drop() {
	if o.rest != nil {
		o.rest.close()
	}
	o.head, o.rest = nil, nil
}
