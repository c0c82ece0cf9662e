package gds

import (
	"container/list"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// Handles keeps files registered with cuFile beyond one use, because registration costs more than a small read. It
// is bounded: the least recently used handle is closed first. A handle in use is closed after its last user.
//
// A file is identified by device and inode. A handle keeps a descriptor open, so the inode number cannot be reused for
// another file. If a file was overwritten in place, its new content is read. But a descriptor also keeps the blocks of
// an unlinked file, so the code that unlinks a file must call [Handles.Forget].
type Handles struct {
	gpu    *GPU
	cufile *CuFile
	max    int

	mu     sync.Mutex
	files  map[fileID]*Handle
	idle   list.List // *Handle without users, least recently used first
	closed bool
	stats  HandleStats
}

type fileID struct{ dev, ino uint64 }

// Handle is a file registered with cuFile, in use until it is released.
type Handle struct {
	cache    *Handles
	id       fileID
	fd       int // owned by the handle
	handle   uintptr
	writable bool
	users    int
	gone     bool          // removed from the cache; closed after its last user
	place    *list.Element // in idle
}

// HandleStats are the counters of a cache.
type HandleStats struct {
	Hits, Misses, Evictions int64
	Open                    int // files registered now
}

// NewHandles makes a cache of at most max idle files; 0 keeps none.
func NewHandles(g *GPU, c *CuFile, max int) *Handles {
	return &Handles{gpu: g, cufile: c, max: max, files: map[fileID]*Handle{}}
}

// Acquire returns the handle of the file behind a descriptor, which may be closed afterwards. Call it on a thread of
// the GPU.
func (c *Handles) Acquire(t *Thread, fd int, write bool) (*Handle, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("gds: stat of a file to register: %w", err)
	}
	id := fileID{uint64(st.Dev), st.Ino}
	c.mu.Lock()
	if h := c.files[id]; h != nil && (h.writable || !write) {
		if h.users++; h.place != nil {
			c.idle.Remove(h.place)
			h.place = nil
		}
		c.stats.Hits++
		c.mu.Unlock()
		return h, nil
	}
	c.stats.Misses++
	c.mu.Unlock()
	h, err := c.register(t, id, fd)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	was := c.files[id]
	switch {
	case c.closed || st.Nlink == 0:
		h.gone, was = true, nil
	case was == nil || h.writable && !was.writable:
		c.files[id] = h
	default: // another thread has registered the file in the meantime
		h.gone, was = true, nil
	}
	end := c.detach(was)
	c.mu.Unlock()
	c.end(t, end)
	return h, nil
}

func (c *Handles) register(t *Thread, id fileID, fd int) (*Handle, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("gds: descriptor for cuFile: %w", err)
	}
	flags, err := unix.FcntlInt(uintptr(own), unix.F_GETFL, 0)
	h := &Handle{cache: c, id: id, fd: own, writable: flags&unix.O_ACCMODE == unix.O_RDWR, users: 1}
	if err == nil {
		h.handle, err = c.cufile.Register(t, own)
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(own))
	}
	c.mu.Lock()
	c.stats.Open++
	c.mu.Unlock()
	return h, nil
}

// detach takes a handle out of the cache, and returns it if it is to be closed now. The caller holds mu.
func (c *Handles) detach(h *Handle) *Handle {
	if h == nil {
		return nil
	}
	if c.files[h.id] == h {
		delete(c.files, h.id)
	}
	h.gone = true
	if h.place == nil {
		return nil // the last user closes it
	}
	c.idle.Remove(h.place)
	h.place = nil
	return h
}

// end deregisters and closes a detached handle.
func (c *Handles) end(t *Thread, h *Handle) {
	if h == nil {
		return
	}
	c.cufile.Deregister(t, h.handle)
	c.close(h)
}

// close closes a handle that is deregistered or belongs to a lost GPU.
func (c *Handles) close(h *Handle) {
	unix.Close(h.fd)
	c.mu.Lock()
	c.stats.Open--
	c.mu.Unlock()
}

// Release ends a use. Call it on a thread of the GPU.
func (h *Handle) Release(t *Thread) {
	c := h.cache
	c.mu.Lock()
	var end *Handle
	if h.users--; h.users == 0 {
		switch {
		case h.gone:
			end = h
		default:
			h.place = c.idle.PushBack(h)
			if c.idle.Len() > c.max {
				c.stats.Evictions++
				end = c.detach(c.idle.Front().Value.(*Handle))
			}
		}
	}
	c.mu.Unlock()
	c.end(t, end)
}

// Forget closes the handle of a file that is being unlinked, now or after its last user.
func (c *Handles) Forget(dev, ino uint64) {
	c.mu.Lock()
	end := c.detach(c.files[fileID{dev, ino}])
	c.mu.Unlock()
	if end != nil {
		c.endAnywhere(end)
	}
}

// endAnywhere is end without a GPU's thread: it deregisters on the thread that never waits for storage. The
// descriptor is closed last, since the last one of an unlinked file frees its blocks. A lost GPU's library is not
// called.
func (c *Handles) endAnywhere(h *Handle) {
	_ = c.gpu.Control(func(t *Thread) error { c.cufile.Deregister(t, h.handle); return nil })
	c.close(h)
}

// Close closes all idle handles. Handles in use are closed by their users.
func (c *Handles) Close() {
	c.mu.Lock()
	c.closed = true
	var ends []*Handle
	for _, h := range c.files {
		if h := c.detach(h); h != nil {
			ends = append(ends, h)
		}
	}
	c.mu.Unlock()
	for _, h := range ends {
		c.endAnywhere(h)
	}
}

// Stats reads the counters.
func (c *Handles) Stats() HandleStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}
