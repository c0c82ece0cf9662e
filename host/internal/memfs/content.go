package memfs

import (
	"io"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/staging"
)

// content is the content of a file. Pages that were never written are holes, which read as zeros. The bytes of the last
// page after the end of the file are zero.
type content struct {
	mu    sync.RWMutex
	size  int64
	parts []part // in order of their offset, without overlaps
	// segments is the memory of all parts. It is nil if there are holes before, between or after them.
	segments staging.Segments
	scratch  []extent

	sized, allocated atomic.Int64 // size of the file, and bytes of parts, for readers without mu
}

// part is an extent and its place in the file.
type part struct {
	off int64
	e   extent
	mem []byte
}

func (p *part) end() int64 { return p.off + int64(len(p.mem)) }

// resize sets the size. mu must be held.
func (c *content) resize(size int64) {
	c.size = size
	c.sized.Store(size)
}

// truncate frees all memory.
func (c *content) truncate(a *arena) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.parts {
		a.release(c.parts[i].e)
	}
	c.parts, c.segments = c.parts[:0], nil
	c.allocated.Store(0)
	c.resize(0)
}

// shrink frees the memory of all pages after the first n bytes, and shortens a longer file to n bytes.
func (c *content) shrink(a *arena, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n >= c.size {
		return
	}
	stop := (n + page - 1) &^ (page - 1)
	kept := c.parts[:0]
	for _, p := range c.parts {
		if free := p.end() - max(p.off, stop); free > 0 {
			pages := uint32(free / page)
			p.e.n -= pages
			a.release(extent{p.e.step, p.e.at + p.e.n, pages})
			p.mem = p.mem[:int64(len(p.mem))-free]
			c.allocated.Add(-free)
		}
		if len(p.mem) > 0 {
			kept = append(kept, p)
		}
	}
	clear(c.parts[len(kept):])
	c.parts, c.segments = kept, nil
	if n < stop && len(kept) > 0 {
		if last := &kept[len(kept)-1]; last.off <= n && n < last.end() {
			clear(last.mem[n-last.off:])
		}
	}
	c.resize(n)
}

// fill allocates the holes among the pages [lo, hi). In new pages, bytes within [off, end) are undefined and all others
// are zero. mu must be held.
func (c *content) fill(a *arena, lo, hi, off, end int64) error {
	lo, hi = lo&^(page-1), (hi+page-1)&^(page-1)
	for at, i := lo, 0; at < hi; {
		for i < len(c.parts) && c.parts[i].end() <= at {
			i++
		}
		stop := hi
		if i < len(c.parts) {
			if c.parts[i].off <= at {
				at = c.parts[i].end()
				continue
			}
			stop = min(stop, c.parts[i].off)
		}
		var err error
		if c.scratch, err = a.alloc((stop-at)/page, c.scratch[:0]); err != nil {
			return err
		}
		for _, e := range c.scratch {
			p := part{off: at, e: e, mem: a.memory(e)}
			clear(p.mem[:max(0, min(off-p.off, int64(len(p.mem))))])
			clear(p.mem[max(0, min(end-p.off, int64(len(p.mem)))):])
			c.parts = append(c.parts, part{})
			copy(c.parts[i+1:], c.parts[i:])
			c.parts[i] = p
			c.allocated.Add(int64(len(p.mem)))
			i++
			at = p.end()
		}
		c.segments = nil
	}
	return nil
}

// readAt copies bytes of the file to p.
func (c *content) readAt(p []byte, off int64) (n int, err error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if len(p) == 0 {
		return 0, nil
	}
	if off >= c.size {
		return 0, io.EOF
	}
	if int64(len(p)) > c.size-off {
		p, err = p[:c.size-off], io.EOF
	}
	for i := range c.parts {
		part := &c.parts[i]
		if part.end() <= off+int64(n) {
			continue
		}
		if hole := part.off - off - int64(n); hole > 0 {
			hole = min(hole, int64(len(p)-n))
			clear(p[n : n+int(hole)])
			n += int(hole)
		}
		if n == len(p) {
			return n, err
		}
		n += copy(p[n:], part.mem[off+int64(n)-part.off:])
	}
	clear(p[n:])
	return len(p), err
}

// writeAt copies p to the file.
func (c *content) writeAt(a *arena, p []byte, off int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(p) == 0 {
		return nil
	}
	end := off + int64(len(p))
	if err := c.fill(a, off, end, off, end); err != nil {
		return err
	}
	n := 0
	for i := range c.parts {
		if part := &c.parts[i]; part.off <= off+int64(n) && off+int64(n) < part.end() {
			n += copy(part.mem[off+int64(n)-part.off:], p[n:])
		}
	}
	c.resize(max(c.size, end))
	return nil
}

// allocate makes the file n bytes long, with memory for all of them.
func (c *content) allocate(a *arena, n int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.fill(a, 0, n, 0, 0); err != nil {
		return err
	}
	c.resize(max(c.size, n))
	return nil
}

// memory returns the file's segments. With grow set, the file is made n bytes long.
func (c *content) memory(a *arena, n int64, grow bool) (staging.Segments, error) {
	c.mu.RLock()
	segments, size := c.segments, c.size
	c.mu.RUnlock()
	if segments != nil && size >= n {
		return segments, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if grow && c.size < n {
		if err := c.fill(a, c.size, n, c.size, n); err != nil {
			return nil, err
		}
		c.resize(n)
	}
	if c.segments != nil || c.size < n {
		return c.segments, nil
	}
	at := int64(0)
	segments = make(staging.Segments, 0, len(c.parts))
	for i := range c.parts {
		p := &c.parts[i]
		if p.off != at {
			return nil, nil
		}
		segments = append(segments, p.mem)
		at = p.end()
	}
	if at < c.size {
		return nil, nil
	}
	c.segments = segments
	return segments, nil
}
