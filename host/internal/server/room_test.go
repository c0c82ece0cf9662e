package server

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// fullRig is a host whose store holds three chunks of p and is full, and whose disk hangs when a victim is to go.
func fullRig(t *testing.T) (*rig, *peer) {
	r := newRig(t, func(_ *Config, s *store.Config) { s.Roots[0].Capacity = 3*pieceBytes + pieceBytes/2 })
	p := r.dial(nil)
	p.save(0, 3)
	r.faults.Set(faultfs.Rule{Op: staging.OpRename | staging.OpRemove, Path: "*", Fault: faultfs.Fault{Hang: true}})
	return r, p
}

// saveHanging begins a STORE that hangs in its reservation.
func (p *peer) saveHanging(r *rig) *client.StoreJob {
	p.t.Helper()
	p.fill(3, 3)
	job, err := p.Store(p.t.Context(), 0, 0, []client.StoreChunk{{Key: key(3), Blocks: blocks(3)}})
	testenv.OK(p.t, err)
	testenv.OK(p.t, r.faults.AwaitHanging(p.t.Context(), 1))
	return job
}

// A STORE whose victim's file will not go holds up no LOOKUP and no LOAD of its session, and can be cancelled and fenced
// all the same.
func TestNothingWaitsForRoom(t *testing.T) {
	r, p := fullRig(t)
	early := p.look(1)
	save := p.saveHanging(r)
	for _, l := range []*client.Lookup{early, p.look(1)} {
		if l.Hits() != 1 {
			t.Fatalf("%d hits", l.Hits())
		}
		if load := p.loaded(p.loads(l, 1)); len(load.Failed) != 0 || !p.holds(0, 0) {
			t.Fatalf("load while a store waits: got %+v", load)
		}
	}
	testenv.OK(t, save.Cancel(t.Context()))
	res, err := save.Published(t.Context())
	if err != nil || !res.Cancelled || res.Chunks[0].Result != client.Failed ||
		!errors.Is(res.Chunks[0].Err, client.ErrCancelled) {
		t.Fatalf("cancelled store: got %+v, %v", res, err)
	}
	testenv.OK(t, errors.Join(p.AwaitCopies(t.Context()), p.regs[0].Unregister(t.Context())))
	until(t, "the load has used its lease up", func() bool { return r.server.Stats().Leases == 0 })
	if n := r.faults.Hanging(); n != 1 {
		t.Fatalf("%d calls hang", n)
	}
	// A session has one reservation at a time: the next waits for it, and can be cancelled too.
	next, err := p.Store(t.Context(), 0, 5, []client.StoreChunk{{Key: key(4), Blocks: blocks(0)}})
	testenv.OK(t, err)
	testenv.OK(t, errors.Join(next.Cancel(t.Context()), p.regs[5].Unregister(t.Context())))
	if n := r.server.Stats().ArenaBytes; n != 0 {
		t.Fatalf("%d bytes mapped", n)
	}
	r.faults.Release()
	r.faults.Set()
	<-only(r.server).reserving.Idle()
	if st := r.store.Stats().Roots[0]; st.Entries != 2 || len(r.temporaries()) != 0 {
		t.Fatalf("%+v, temporaries %v", st, r.temporaries())
	}
}

// The end of a session does not wait for a reservation either; the end of the host does.
func TestSessionEndDoesNotWaitForRoom(t *testing.T) {
	r, p := fullRig(t)
	q := r.dial(nil)
	before, mapped := r.server.Stats().ArenaBytes, mappings(t)
	p.saveHanging(r)
	p.Close()
	until(t, "the session is gone", func() bool { return r.server.Stats().Sessions == 1 })
	if st := r.server.Stats(); st.Jobs != 0 || st.ArenaBytes != before/2 || mappings(t) != mapped-1 {
		t.Fatalf("%+v, %d mappings less", st, mapped-mappings(t))
	}
	if l := q.look(3); r.faults.Hanging() != 1 {
		t.Fatalf("%d hits, %d calls hang", l.Hits(), r.faults.Hanging())
	}
	r.faults.Release()
	r.stop()
	testenv.OK(t, <-r.served)
	r.served <- nil
	if st := r.store.Stats().Roots[0]; st.Entries != 2 || len(r.temporaries()) != 0 {
		t.Fatalf("%+v, temporaries %v", st, r.temporaries())
	}
}
