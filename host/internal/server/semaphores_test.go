package server

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
)

// Semaphores of the tests: 0 is waited for, 1 is a job's done semaphore, its status semaphores stand from 2 on.
func (p *peer) share() *client.Semaphores {
	p.t.Helper()
	a, err := p.NewArena(4096)
	testenv.OK(p.t, err)
	p.t.Cleanup(func() { a.Close() })
	w, err := p.ShareSemaphores(p.t.Context(), a, 64, 16)
	testenv.OK(p.t, err)
	return w
}

func (p *peer) loadInOrder(l *client.Lookup, n int, t *client.Timeline) *client.LoadJob {
	p.t.Helper()
	var list []client.LoadChunk
	for i := range n {
		p.poison(i)
		list = append(list, client.LoadChunk{Index: i, Blocks: blocks(i)})
	}
	job, err := p.Load(p.t.Context(), l, list, client.LoadOptions{Timeline: t})
	testenv.OK(p.t, err)
	return job
}

// A store does not read its blocks before its semaphore comes, and says by a semaphore when they are free; a load
// likewise, layer by layer.
func TestSemaphoresPutJobsInOrder(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	w := p.share()
	ctx := t.Context()
	job, err := p.Store(ctx, 0, 0, []client.StoreChunk{chunkOf(0, 0)}, client.WithTimeline(&client.Timeline{
		Semaphores: w, Wait: 0, WaitValue: 7, Done: 1, DoneValue: 10, Status: 2,
	}))
	testenv.OK(t, err)
	w.Store(0, 6)
	if err := p.Ping(ctx); err != nil { // the session goes on
		t.Fatal(err)
	}
	p.fill(0, 0) // the blocks get their bytes only now
	if w.Load(1) != 0 {
		t.Fatal("the store has read its blocks before its semaphore came")
	}
	w.Store(0, 8)
	if err := w.Wait(ctx, 1, 10); err != nil || w.Load(2) != client.StatusDone {
		t.Fatal(err, w.Load(2))
	}
	p.poison(0)
	if res, err := job.Published(ctx); err != nil || res.Chunks[0].Result != client.Stored {
		t.Fatal(res, err)
	}
	p.save(1, 3)

	w.Store(1, 0)
	w.Store(2, client.StatusOpen)
	load := p.loadInOrder(p.look(3), 3, &client.Timeline{Semaphores: w, Wait: 0, WaitValue: 20, Done: 1, DoneValue: 100,
		Status: 2, Layers: layers})
	testenv.OK(t, p.Ping(ctx))
	if w.Load(1) != 0 || p.holds(0, 0) {
		t.Fatal("the load has begun before its semaphore came")
	}
	w.Store(0, 20)
	for layer := range layers {
		if err := w.Wait(ctx, 1, 100-layers+uint64(layer)); err != nil || w.Load(2+layer) != client.StatusDone {
			t.Fatalf("layer %d: %v, status %d", layer, err, w.Load(2+layer))
		}
		for i := range 3 {
			for part := range parts {
				if got := p.page(layer*parts+part,
					blocks(i)[0]); string(got) != string(pattern(i, 0, layer*parts+part, 0)) {
					t.Fatalf("layer %d of chunk %d is not there", layer, i)
				}
			}
		}
	}
	testenv.OK(t, w.Wait(ctx, 1, 100))
	if res := p.loaded(load); len(res.Failed) > 0 {
		t.Fatal(res.Failed)
	}
}

// Semaphores are advanced when a job fails, is cancelled, or has a lease that is over; a job that waits is cancelled
// untouched.
func TestSemaphoresOfJobsThatFail(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	w := p.share()
	p.save(0, 2)
	reset := func() {
		for i := range 8 {
			w.Store(i, 0)
		}
	}
	order := func() *client.Timeline {
		reset()
		return &client.Timeline{Semaphores: w, Done: 1, DoneValue: 100, Status: 2, Layers: layers}
	}
	wait := func(what string, status ...uint64) {
		t.Helper()
		if err := w.Wait(t.Context(), 1, 100); err != nil {
			t.Fatal(what, err)
		}
		for i, s := range status {
			if w.Load(2+i) != s {
				t.Errorf("%s: status %d of layer %d, want %d", what, w.Load(2+i), i, s)
			}
		}
	}

	o := order()
	o.Wait, o.WaitValue = 0, 5 // never comes
	job := p.loadInOrder(p.look(2), 2, o)
	testenv.OK(t, job.Cancel(t.Context()))
	wait("cancelled", client.StatusFailed, client.StatusFailed)
	if res := p.loaded(job); !res.Cancelled || len(res.Failed) != 2*chunkBlocks {
		t.Errorf("cancelled load: got %+v, want all blocks failed", res)
	}
	for i := range 2 {
		if string(p.page(0, blocks(i)[0])) != string(make([]byte, pageBytes)) {
			t.Error("a job that was cancelled while it waited has touched its blocks")
		}
	}

	o = order()
	l := p.look(2)
	l.Release(t.Context())
	p.loaded(p.loadInOrder(l, 2, o))
	wait("lease over", client.StatusFailed, client.StatusFailed)

	o = order()
	l = p.look(2)
	l.Release(t.Context())
	o.Wait, o.WaitValue = 0, 5 // never comes
	testenv.OK(t, p.loadInOrder(l, 2, o).Cancel(t.Context()))
	wait("lease over, and cancelled", client.StatusFailed, client.StatusFailed)

	for name, wrong := range map[string]*client.Timeline{
		"a semaphore that does not exist": {Semaphores: w, Done: 99, DoneValue: 100, Status: -1},
		"statuses that do not fit":        {Semaphores: w, DoneValue: 100, Status: 15, Layers: 2},
		"a value that no layer is under":  {Semaphores: w, Done: 9, DoneValue: 2, Status: -1, Layers: 2},
	} {
		job, err := p.Load(t.Context(), p.look(1), []client.LoadChunk{{Blocks: blocks(0)}},
			client.LoadOptions{Timeline: wrong, Layers: func(uint32, []int) {}})
		if err == nil {
			_, err = job.Wait(t.Context())
		}
		if !errors.Is(err, client.ErrInvalid) {
			t.Errorf("timeline with %s: got %v, want INVALID", name, err)
		}
	}
	if _, err := p.ShareSemaphores(t.Context(), p.arena, 0, 1); !errors.Is(err, client.ErrBusy) {
		t.Errorf("semaphores shared twice: %v", err)
	}
	other := r.dial(nil)
	k := key(50)
	_, err := other.Store(t.Context(), 0, 0, []client.StoreChunk{{Key: k, Blocks: blocks(0)}},
		client.WithTimeline(&client.Timeline{DoneValue: 1}))
	if !errors.Is(err, client.ErrInvalid) {
		t.Errorf("no semaphores: %v", err)
	}

	o = order()
	r.faults.Set(faultfs.MustRules("read * 1st: eio")...)
	p.loaded(p.loadInOrder(p.look(2), 2, o))
	wait("a read failed", client.StatusFailed, client.StatusFailed)
	r.faults.Set()
}

// gpuSemaphores is a session with pages and semaphores on a GPU, which are 0, as the client reaches them
// and as a test does.
func gpuSemaphores(t *testing.T) (*client.Session, *client.Semaphores, *gds.Semaphores, device) {
	t.Helper()
	r := newGPURig(t)
	s := r.dialGPU(gdstest.UUID)
	handles, d := r.ipc()
	if _, err := s.RegisterIPC(t.Context(), 0, handles, groupRegions(0)); err != nil {
		t.Fatal(err)
	}
	b, err := r.gpu.Alloc(8192)
	testenv.OK(t, err)
	t.Cleanup(func() { b.Free() })
	handle, err := b.IPCHandle()
	testenv.OK(t, err)
	w, err := s.ShareDeviceSemaphores(t.Context(), handle, 4096, 16)
	testenv.OK(t, err)
	mine, err := r.gpu.NewSemaphores(b.Address+4096, 16)
	testenv.OK(t, err)
	t.Cleanup(func() { mine.Close() })
	for i := range 16 {
		testenv.OK(t, mine.Store(i, 0))
	}
	return s, w, mine, d
}

// Semaphores may be a GPU's memory: they are read and written there, for jobs over its pages.
func TestSemaphoresOnAGPU(t *testing.T) {
	s, w, mine, d := gpuSemaphores(t)
	wait := func(i int, v uint64) {
		t.Helper()
		until(t, "the semaphore comes", func() bool {
			got, err := mine.Load(i)
			return err == nil && got >= v
		})
	}
	d.fill(3, blocks(0))
	job, err := s.Store(t.Context(), 0, 0, []client.StoreChunk{chunkOf(0, 0)},
		client.WithTimeline(&client.Timeline{Semaphores: w, WaitValue: 1, Done: 1, DoneValue: 2, Status: -1}))
	testenv.OK(t, err)
	d.fill(0, blocks(0))
	testenv.OK(t, mine.Store(0, 1))
	wait(1, 2)
	d.fill(9, blocks(0))
	if res, err := job.Published(t.Context()); err != nil || res.Chunks[0].Result != client.Stored {
		t.Fatal(res, err)
	}
	l, err := s.Lookup(t.Context(), client.LookupRequest{Keys: keys(1)})
	testenv.OK(t, err)
	load, err := s.Load(t.Context(), l, []client.LoadChunk{{Blocks: blocks(2)}}, client.LoadOptions{
		Layers: func(uint32, []int) {}, Timeline: &client.Timeline{Semaphores: w, Done: 3, DoneValue: 50, Status: 4,
			Layers: layers},
	})
	testenv.OK(t, err)
	wait(3, 50)
	if res, err := load.Wait(t.Context()); err != nil || len(res.Failed) > 0 {
		t.Fatal(res, err)
	}
	d.check(0, blocks(2))
	for i := range layers {
		if got, err := mine.Load(4 + i); err != nil || got != client.StatusDone {
			t.Errorf("layer %d: %d, %v", i, got, err)
		}
	}
}

// The end of a session gives its semaphores up only when nobody reads or writes them any more: the reader that hears
// a CANCEL, and the goroutine of a STORE that has made its room.
func TestSessionEndWaitsForItsSemaphores(t *testing.T) {
	for name, c := range map[string]struct {
		puts   int  // that the store has seen: it refuses the second
		held   bool // the STORE waits for a semaphore
		cancel bool // the STORE is cancelled while it makes room
	}{
		"cancelled before it began":    {cancel: true},
		"nothing found room":           {puts: 1},
		"held until a semaphore comes": {held: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := &fakeStore{puts: c.puts}
			if c.cancel {
				b.hold = make(chan struct{})
			}
			s := fakeServer(t, Config{}, b)
			w := newTalk(t, s, greeting("a"))
			x := only(s)
			pagesFor(t, x)
			slow := &slowSemaphores{begun: make(chan struct{}), pass: make(chan struct{})}
			x.timelines.mu.Lock()
			x.timelines.shared = &sharedSemaphores{semaphores: slow, count: 4}
			x.timelines.mu.Unlock()
			m := storeOf(1)
			timeline := &proto.Timeline{Done: 1, DoneValue: 1}
			if c.held {
				timeline.WaitValue = 1
			}
			m.GetStore().Timeline = timeline
			job := w.say(m)
			if c.cancel {
				until(t, "the store makes room", func() bool { return x.reserving.Len() > 0 })
				w.say(cancelOf(job))
			}
			<-slow.begun
			x.end(errClientDone)
			until(t, "the session's end has begun", func() bool {
				x.jobs.mu.Lock()
				defer x.jobs.mu.Unlock()
				return x.jobs.ended
			})
			select {
			case err := <-w.end:
				t.Errorf("the session gave its semaphores up in the middle of an access (%v)", err)
				w.end <- nil
			case <-time.After(20 * time.Millisecond):
			}
			close(slow.pass)
			testenv.NoError(t, <-w.end)
		})
	}
}

// slowSemaphores hold every access up, and say when one has begun.
type slowSemaphores struct {
	once  sync.Once
	begun chan struct{}
	pass  chan struct{}
}

func (w *slowSemaphores) hold() {
	w.once.Do(func() { close(w.begun) })
	<-w.pass
}

func (w *slowSemaphores) Load(int) (uint64, error) {
	w.hold()
	return 0, nil
}

func (w *slowSemaphores) Store(int, uint64) error {
	w.hold()
	return nil
}
