package server

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
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

// childSocket makes this test binary a client that stores, loads and waits to be killed.
const childSocket = "KVHOST_TEST_CHILD_SOCKET"

func TestMain(m *testing.M) {
	if socket := os.Getenv(childSocket); socket != "" {
		victim(socket)
		return
	}
	os.Exit(m.Run())
}

func victim(socket string) {
	ctx := context.Background()
	fail := func(err error) {
		if err != nil {
			println(err.Error())
			os.Exit(1)
		}
	}
	s, err := client.Dial(ctx, client.Hello{Socket: socket, Engine: "victim", Namespace: testNamespace()})
	fail(err)
	arena, err := s.NewArena(planes * arenaBlocks * pageBytes)
	fail(err)
	_, err = s.Register(ctx, 0, arena, groupRegions(0))
	fail(err)
	l, err := s.Lookup(ctx, client.LookupRequest{Request: 1, Keys: keys(2)})
	fail(err)
	_, err = s.Lookup(ctx, client.LookupRequest{Request: 2, Keys: keys(2)}) // a lease that nobody ends
	fail(err)
	_, err = s.Load(ctx, l, []client.LoadChunk{{Index: 0, Blocks: blocks(0)}, {Index: 1, Blocks: blocks(1)}}, client.LoadOptions{})
	fail(err)
	_, err = s.Store(ctx, 3, 0, []client.StoreChunk{chunkOf(20, 2), chunkOf(21, 3)})
	fail(err)
	select {}
}

func TestKilledClientLeavesNothing(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 2)
	mapped, before := mappings(t), r.server.Stats()
	r.faults.Set(faultfs.Rule{Op: staging.OpRead | staging.OpWrite, Path: "*", Fault: faultfs.Fault{Hang: true}})
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childSocket+"="+r.socket)
	child.Stderr = os.Stderr
	testenv.OK(t, child.Start())
	if err := r.faults.AwaitHanging(testenv.Context(t), 4); err != nil { // two loads and two stores
		t.Fatal(err)
	}
	if st := r.server.Stats(); st.Sessions != 2 || st.Leases != 1 || st.Jobs != 2 || mappings(t) != mapped+1 {
		t.Fatalf("%+v, %d mappings", st, mappings(t)-mapped)
	}
	child.Process.Kill()
	child.Wait()
	// The I/O under its jobs still hangs; its memory is gone from here all the same.
	until(t, "the session is gone", func() bool { return r.server.Stats().Sessions == 1 })
	if st := r.server.Stats(); st.Leases != 0 || st.Engines != 1 || st.ArenaBytes != before.ArenaBytes ||
		mappings(t) != mapped {
		t.Fatalf("%+v, %d mappings", st, mappings(t)-mapped)
	}
	testenv.OK(t, p.Ping(t.Context()))
	r.faults.Release()
	r.faults.Set()
	until(t, "its jobs are over", func() bool { return r.server.Stats().Jobs == 0 })
	if list := r.temporaries(); len(list) != 0 {
		t.Fatalf("temporaries: %v", list)
	}
	p.check(2)
}

// A client that closes its session is not taken for one that died.
func TestClosedSessionCancelsItsJobs(t *testing.T) {
	var log bytes.Buffer
	r := newRig(t, func(c *Config, _ *store.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	p := r.dial(nil)
	p.save(0, 2)
	job := p.loadsHanging(r, 2)
	p.Close()
	if _, err := job.Wait(t.Context()); !errors.Is(err, client.ErrClosed) {
		t.Errorf("load of a closed session: got %v", err)
	}
	if err := p.Ping(t.Context()); !errors.Is(err, client.ErrClosed) {
		t.Errorf("ping of a closed session: got %v", err)
	}
	until(t, "all is given up", func() bool {
		st := r.server.Stats()
		return st.Sessions == 0 && st.Engines == 0 && st.Leases == 0 && st.ArenaBytes == 0
	})
	r.faults.Release()
	r.stop()
	testenv.OK(t, <-r.served)
	r.served <- nil
	if s := log.String(); strings.Count(s, "session ended") != 1 || !strings.Contains(s, errClientDone.Error()) {
		t.Errorf("the log says\n%s", s)
	}
}

func TestHostGoesDown(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 2)
	job := p.loadsHanging(r, 2)
	r.stop()
	<-p.Ended()
	// The load's last answer may have come through before the end; either way it has one.
	if res, err := job.Wait(t.Context()); err == nil && len(res.Failed) != 4 || err != nil &&
		!errors.Is(err, client.ErrHostGone) {
		t.Errorf("load when the host ends: got %+v, %v", res, err)
	}
	if err := p.Ping(t.Context()); !errors.Is(err, client.ErrHostGone) {
		t.Errorf("ping when the host has ended: got %v", err)
	}
	r.faults.Release()
	testenv.OK(t, <-r.served)
	r.served <- nil
	if _, err := client.Dial(t.Context(), r.hello()); !errors.Is(err, client.ErrHostGone) {
		t.Errorf("dial when the host has ended: got %v", err)
	}
	for _, name := range []string{r.socket, r.socket + ".fd", r.socket + ".lock"} {
		if _, err := os.Lstat(name); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
	if err := r.server.Serve(t.Context(), r.socket); !errors.Is(err, ErrClosing) {
		t.Errorf("serve once more: got %v", err)
	}
}

func TestSlowClientLosesItsSession(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Limits.Outgoing, c.SlowTimeout = 16, 50*time.Millisecond })
	p := r.dial(nil)
	w := r.raw()
	w.say(greeting("e"))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for id := uint64(2); ; id++ { // never reads
			if w.stream.Send(&proto.SessionRequest{Id: id, Body: &proto.SessionRequest_Ping{}}) != nil {
				return
			}
		}
	}()
	until(t, "the slow session ends", func() bool {
		testenv.OK(t, p.Ping(t.Context()))
		return r.server.Stats().Sessions == 1
	})
	w.conn.Close()
	<-ended
}

// BenchmarkPing is the round trip of the smallest message.
func BenchmarkPing(b *testing.B) {
	p := newRig(b, nil).dial(nil)
	b.ReportAllocs()
	for b.Loop() {
		testenv.OK(b, p.Ping(b.Context()))
	}
}

// BenchmarkLookup asks for 1,000 keys: of which none is there, and all.
func BenchmarkLookup(b *testing.B) {
	const n = 1000
	for _, c := range []struct {
		name string
		hits int
	}{{"miss", 0}, {"hit", n}} {
		b.Run(c.name, func(b *testing.B) {
			p := newRig(b, nil).dial(nil)
			for at := 0; at < c.hits; at += arenaBlocks / chunkBlocks {
				var list []client.StoreChunk
				for k := at; k < min(c.hits, at+arenaBlocks/chunkBlocks); k++ {
					list = append(list, chunkOf(k, k-at))
				}
				if _, err := p.store(list); err != nil {
					b.Fatal(err)
				}
			}
			q := client.LookupRequest{Keys: keys(n)}
			b.ReportAllocs()
			for b.Loop() {
				l, err := p.Lookup(b.Context(), q)
				if err != nil || l.Hits() != c.hits {
					b.Fatal(l.Hits(), err)
				}
				if c.hits > 0 {
					b.StopTimer()
					testenv.OK(b, l.Release(b.Context()))
					b.StartTimer()
				}
			}
		})
	}
}
