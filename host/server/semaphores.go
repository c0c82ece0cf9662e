package server

import (
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/transfer"
)

// semaphores are what a session has shared by SEMAPHORES.
type semaphores interface {
	Load(i int) (uint64, error)
	Store(i int, v uint64) error
}

// sharedSemaphores are a session's semaphores and what keeps them mapped.
type sharedSemaphores struct {
	semaphores
	count   int
	mapping *mapping      // of host memory
	keep    *registration // of a GPU's
	device  *gds.Semaphores
}

// hostSemaphores are semaphores in memory that is mapped here.
type hostSemaphores []uint64

func (w hostSemaphores) Load(i int) (uint64, error) { return atomic.LoadUint64(&w[i]), nil }

func (w hostSemaphores) Store(i int, v uint64) error {
	atomic.StoreUint64(&w[i], v)
	return nil
}

// maxSemaphores bounds what a session can share.
const maxSemaphores = 1 << 20

// share is SEMAPHORES.
func (x *session) share(m *proto.Semaphores) error {
	region := &proto.Region{Offset: m.GetOffset()}
	switch h := m.GetHandle().(type) {
	case *proto.Semaphores_Memfd:
		region.Handle = &proto.Region_Memfd{Memfd: h.Memfd}
	case *proto.Semaphores_CudaIpc:
		region.Handle = &proto.Region_CudaIpc{CudaIpc: h.CudaIpc}
	case *proto.Semaphores_CudaVmm:
		region.Handle = &proto.Region_CudaVmm{CudaVmm: h.CudaVmm}
	}
	files := x.takeDescriptors([]*proto.Region{region})
	defer files.close()
	switch {
	case x.sharing() != nil:
		return faultf(proto.Code_CODE_BUSY, "semaphores", "the session has shared semaphores already")
	case m.GetCount() == 0 || m.GetCount() > maxSemaphores:
		return invalid("count", "%d semaphores, want 1 to %d", m.GetCount(), maxSemaphores)
	case m.GetOffset()%8 != 0 || m.GetOffset() > 1<<62:
		return invalid("offset", "%d is not a multiple of 8 that any memory has", m.GetOffset())
	}
	w := &sharedSemaphores{count: int(m.GetCount())}
	if err := x.mapSemaphores(w, region, files); err != nil {
		x.unshare(w)
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.semaphores = w
	return nil
}

// mapSemaphores maps the memory of semaphores. What it has taken is in w, also when it fails.
func (x *session) mapSemaphores(w *sharedSemaphores, r *proto.Region, files descriptors) (err error) {
	off, size := int64(r.GetOffset()), 8*int64(w.count)
	switch h := r.GetHandle().(type) {
	case *proto.Region_Memfd:
		f := files[h.Memfd]
		if f == nil {
			return faultf(proto.Code_CODE_UNKNOWN, "memfd", "no descriptor came under tag %d", h.Memfd)
		}
		if w.mapping, err = x.mapArena(f); err != nil {
			return err
		}
		if off > w.mapping.file.size-size {
			return invalid("offset", "%d semaphores from %d on do not fit %d bytes", w.count, off, w.mapping.file.size)
		}
		w.semaphores = hostSemaphores(unsafe.Slice((*uint64)(unsafe.Pointer(&w.mapping.data[off])), w.count))
		return nil
	case *proto.Region_CudaIpc, *proto.Region_CudaVmm:
		if x.gpu == nil {
			return x.noGPU("handle")
		}
		w.keep = &registration{}
		mem, err := x.importHandle("handle", r, files, map[string]*gds.Import{}, w.keep)
		if err != nil {
			return err
		}
		if off > mem.Size-size {
			return invalid("offset", "%d semaphores from %d on do not fit %d bytes", w.count, off, mem.Size)
		}
		if w.device, err = x.gpu.NewSemaphores(mem.Base+uint64(off), w.count); err != nil {
			return err
		}
		w.semaphores = w.device
		return nil
	}
	return invalid("handle", "none that this host knows")
}

// unshare gives the memory of semaphores up. No job uses them any more.
func (x *session) unshare(w *sharedSemaphores) {
	if w == nil {
		return
	}
	if w.device != nil {
		if err := w.device.Close(); err != nil {
			x.log.Error("unmap semaphores", "error", err)
		}
	}
	if w.keep != nil {
		x.closeImports(w.keep)
	}
	if w.mapping != nil {
		x.unmapArena(w.mapping)
	}
}

func (x *session) sharing() *sharedSemaphores {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.semaphores
}

// timeline is a job's part of the semaphores. A nil one does nothing.
type timeline struct {
	session    *session
	semaphores *sharedSemaphores
	wait       int
	from       uint64 // value that is waited for, 0 for none
	done       int
	to         uint64
	status     int // -1: none
	layers     int // of a layer-wise load, else 0
	landed     int // told of
}

// Values of a status semaphore.
const (
	statusDone   = 1
	statusFailed = 2
)

// timelineOf reads a job's timeline; n are the layers of a layer-wise load.
func (x *session) timelineOf(m *proto.Timeline, n int) (*timeline, error) {
	if m == nil {
		return nil, nil
	}
	w := x.sharing()
	if w == nil {
		return nil, faultf(proto.Code_CODE_UNKNOWN, "timeline", "the session has shared no semaphores")
	}
	t := &timeline{session: x, semaphores: w, wait: int(m.GetWait()), from: m.GetWaitValue(), done: int(m.GetDone()), to: m.GetDoneValue(), status: -1, layers: n}
	switch {
	case t.wait >= w.count:
		return nil, invalid("timeline.wait", "%d of %d", t.wait, w.count)
	case t.done >= w.count:
		return nil, invalid("timeline.done", "%d of %d", t.done, w.count)
	case t.to <= uint64(n):
		return nil, invalid("timeline.done_value", "%d, want more than the %d layers", t.to, n)
	}
	if m.Status != nil {
		if t.status = int(m.GetStatus()); t.status > w.count-max(1, n) {
			return nil, invalid("timeline.status", "%d semaphores from %d on, of %d", max(1, n), t.status, w.count)
		}
	}
	return t, nil
}

// write sets a semaphore. A GPU that is lost takes no semaphores any more; its client finds out by itself.
func (t *timeline) write(i int, v uint64) {
	if err := t.semaphores.Store(i, v); err != nil {
		t.session.log.Error("a semaphore of the client's cannot be written", "semaphore", i, "error", err)
	}
}

// layer tells that the next layer has landed, in all chunks or not.
func (t *timeline) layer(failed bool) {
	if t == nil {
		return
	}
	t.mark(failed)
	t.write(t.done, t.to-uint64(t.layers-t.landed))
	t.landed++
}

func (t *timeline) mark(failed bool) {
	if t.status < 0 {
		return
	}
	v := uint64(statusDone)
	if failed {
		v = statusFailed
	}
	t.write(t.status+t.landed, v)
}

// over tells that no copy of the job can touch its blocks any more. Layers that were not told of have failed.
func (t *timeline) over(failed bool) {
	if t == nil {
		return
	}
	if t.layers == 0 {
		t.mark(failed)
	}
	for ; t.landed < t.layers; t.landed++ {
		t.mark(true)
	}
	t.write(t.done, t.to)
}

// reached says whether what the job waits for has come.
func (t *timeline) reached() (bool, error) {
	if t == nil || t.from == 0 {
		return true, nil
	}
	v, err := t.semaphores.Load(t.wait)
	return v >= t.from, err
}

// awaiting is a job that is held until its semaphore comes.
type awaiting struct {
	timeline *timeline
	job      *job
}

// settled begins the job if it is due, and says whether it needs no more waiting.
func (a awaiting) settled() bool {
	select {
	case <-a.job.handle.Fenced(): // cancelled
		return true
	default:
	}
	reached, err := a.timeline.reached()
	switch {
	case err != nil:
		a.job.session.log.Error("a semaphore of the client's cannot be read; its job is cancelled", "job", a.job.id, "error", err)
		a.job.cancel()
		return true
	case reached:
		a.job.handle.Begin()
	}
	return reached
}

// await begins a job that was held when its timeline says so.
func (x *session) await(j *job, t *timeline) {
	if t == nil || t.from == 0 {
		return // it was not held
	}
	a := awaiting{t, j}
	if a.settled() {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ended { // which cancels the job
		return
	}
	x.awaited = append(x.awaited, a)
	if !x.polling {
		x.polling = true
		x.waiters.Go(x.poll)
	}
}

// How often semaphores are asked for: often while something has just happened, and ever less.
const (
	shortestPoll = 50 * time.Microsecond
	longestPoll  = time.Millisecond
)

// poll asks for the semaphores that jobs wait for, until none does.
func (x *session) poll() {
	pause := time.NewTimer(shortestPoll)
	defer pause.Stop()
	wait := shortestPoll
	for {
		x.mu.Lock()
		list := x.awaited
		x.awaited = nil
		if len(list) == 0 {
			x.polling = false
			x.mu.Unlock()
			return
		}
		x.mu.Unlock()
		rest := list[:0]
		for _, a := range list {
			if a.settled() {
				wait = shortestPoll
			} else {
				rest = append(rest, a)
			}
		}
		x.mu.Lock()
		x.awaited = append(rest, x.awaited...)
		x.mu.Unlock()
		pause.Reset(wait)
		select {
		case <-x.ctx.Done():
			return
		case <-pause.C:
		}
		wait = min(wait+wait/8, longestPoll)
	}
}

var _ fence = (*transfer.Handle)(nil)
