package s3fs

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// leastHead is the least of an object that the request which opens it brings, so that it need not be read by another one: what
// pieces have before their payload. Where more was read at first of another object, it brings as much. An object that is no longer
// stays in memory while it is open, of which there may be thousands.
const leastHead = 16 << 10

// object is a version of an object, open for reading.
type object struct {
	fs  *FS
	key string
	at  version

	mu   sync.Mutex
	head []byte  // its first bytes, for the first read
	rest *stream // what follows them, likewise
}

func (f *FS) openObject(name string) (staging.File, error) {
	o := &object{fs: f, key: f.key(name)}
	head := make([]byte, leastHead)
	n, rest, at, err := f.open(o.key, head, min(max(leastHead, int(f.first.Load())), f.cfg.Part))
	if err != nil && errnoOf(err, false) == unix.ESTALE { // no range of an empty object can be had
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
			m, _ = rest.read(p[n:]) // what it lacks is asked for again
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

// drop frees the bytes for the first read. The caller holds mu.
func (o *object) drop() {
	if o.rest != nil {
		o.rest.close()
	}
	o.head, o.rest = nil, nil
}
