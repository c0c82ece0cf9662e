package server

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// A context ends the waiting, not the job; and a host that never answers does not hold a caller.
func TestContextsEndTheWaiting(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 2)
	job := p.loadsHanging(r, 2)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := job.Wait(over); !errors.Is(err, context.Canceled) {
		t.Errorf("wait: %v", err)
	}
	if _, err := p.Lookup(over, client.LookupRequest{}); !errors.Is(err, context.Canceled) {
		t.Errorf("lookup: %v", err)
	}
	if err := p.AwaitCopies(shortly(t)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("await copies: got %v, want the deadline", err)
	}
	r.faults.Release()
	r.faults.Set()
	if res := p.loaded(job); len(res.Failed) != 0 || !p.holds(0, 0) || !p.holds(1, 1) {
		t.Errorf("the job suffered: %+v", res)
	}

	mute, err := net.Listen("unix", r.dir+"/mute")
	testenv.OK(t, err)
	defer mute.Close()
	h := r.hello()
	h.Socket = r.dir + "/mute"
	if _, err := client.Dial(shortly(t), h); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("dial: %v", err)
	}
}

func shortly(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// Many goroutines on one session, each with its own chunk and request.
func TestSessionIsSafeForConcurrentUse(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	var work sync.WaitGroup
	for n := range 16 {
		work.Go(func() {
			p.fill(n, n)
			c := client.StoreChunk{Key: key(1000 + n), Blocks: blocks(n)}
			job, err := p.Store(t.Context(), uint32(n+1), 0, []client.StoreChunk{c})
			if err != nil {
				t.Error(err)
				return
			}
			if res, err := job.Published(t.Context()); err != nil || res.Chunks[0].Result != client.Stored {
				t.Errorf("store: got %+v, %v", res, err)
				return
			}
			q := client.LookupRequest{Request: uint32(n + 1), Keys: keys(1001 + n)[1000+n:]}
			l, err := p.Lookup(t.Context(), q)
			if err != nil || l.Hits() != 1 {
				t.Errorf("lookup: got %+v, %v, want a hit", l, err)
				return
			}
			load, err := p.Load(t.Context(), l, []client.LoadChunk{{Blocks: blocks(16 + n)}}, client.LoadOptions{})
			if err != nil {
				t.Error(err)
				return
			}
			if res, err := load.Wait(t.Context()); err != nil || len(res.Failed) != 0 || !p.holds(n, 16+n) {
				t.Errorf("chunk %d: %+v, %v", n, res, err)
			}
			testenv.NoError(t, errors.Join(p.EndRequest(t.Context(), uint32(n+1), client.Hints{}), p.Ping(t.Context())))
		})
	}
	work.Wait()
	var st *proto.StatusResponse // a job's result is there before the job is gone
	testenv.Until(t, "one session without leases and jobs", func() bool {
		var err error
		st, err = proto.Status(t.Context(), r.socket)
		testenv.OK(t, err)
		return st.Sessions == 1 && st.Leases == 0 && st.Jobs == 0
	}, func() any { return st })
}
