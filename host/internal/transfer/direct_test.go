package transfer

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

var deviceShapes = map[string]kv.Geometry{
	"small pages":     kv.Uniform(4, 3, 2, 4096),
	"odd pages":       kv.Uniform(3, 2, 1, 5000),
	"tiny pages":      kv.Uniform(2, 2, 1, 16),
	"larger than one": kv.Uniform(4, 4, 1, 100_000),
	"many windows":    kv.Uniform(3, 9, 1, 300_000),
}

// Pages of a GPU of every shape go out and come back by the route of their root: cuFile, or kernels without a slot where the root
// is memory. They are compressed by the GPU, unless the processor has to do it.
func TestShapesTakeTheirRoute(t *testing.T) {
	testenv.Slow(t)
	const n = 5
	for name, geo := range deviceShapes {
		for _, c := range []struct {
			kind, route             string
			compressed, byProcessor bool
		}{
			{"direct", "direct", false, false}, {"memory", "memory", false, false}, {"compressed", "direct", true, false},
			{"compressed by the processor", "staged", true, true},
		} {
			t.Run(name+", "+c.kind, func(t *testing.T) {
				var r *deviceRig
				switch {
				case c.compressed:
					r = newCompressedRig(t, "bf16", geo, 64)
				case c.kind == "memory":
					r, _ = newMemoryRig(t, geo, 64)
				default:
					r = newDeviceRig(t, geo, 64, 32<<20)
				}
				if c.kind != "memory" {
					r.route(RouteChoice{})
				}
				if c.byProcessor {
					r.disableCodec()
				}
				var chunks []StoreChunk
				for i, ids := range r.shuffled(n) {
					chunks = append(chunks, r.put(i, ids))
				}
				compresses := chunks[0].Put.Compresses()
				if compresses != (c.compressed && name != "tiny pages") {
					t.Errorf("pieces are compressed: %t", compresses)
				}
				r.mustStore(chunks...)
				back := func(what string) {
					t.Helper()
					r.poison()
					ids := r.shuffled(n)
					r.mustLoad([]int{0, 1, 2, 3, 4}, ids)
					for i := range n {
						if err := r.holds(i, ids[i], false); err != nil {
							t.Error(what, err)
						}
					}
				}
				back("at once")
				route := c.route
				if c.byProcessor && !compresses {
					route = "direct"
				}
				if took := r.took(); len(took) != 1 || took[route] != 2*n {
					t.Errorf("pieces by route: %v, want all %s", took, route)
				}
				if s := r.store.Compression(); compresses && (s[0].Encoded.Pages != n*geo.PageBytes() ||
					s[0].Decoded.Pages != n*geo.PageBytes() || s[0].Encoded.Took <= 0 || s[0].Decoded.Took <= 0) {
					t.Errorf("encoded %+v, decoded %+v", s[0].Encoded, s[0].Decoded)
				}
				if d := r.double; d != nil && (d.Calls("pack") > 0 && d.Calls("join") > 0) != (compresses && !c.byProcessor) {
					t.Errorf("%d windows encoded, %d decoded", d.Calls("pack"), d.Calls("join"))
				}
				if !r.gpu.FitsWindow(1, 1) {
					t.Error("windows were given up")
				}
				if route != "direct" {
					return
				}
				for range 2 { // the second finds the file registered, whatever the order of the others was
					r.mustLoad([]int{0}, r.shuffled(1))
				}
				if s := r.stats(); s.Stores != n || s.Loads != n+2 || s.Route != "direct" || s.SlotsInUse != 0 || s.Handles.Hits == 0 {
					t.Errorf("after %d stores and %d loads the route has %+v", n, n+2, s)
				}
				r.engine.SetRoute(r.gpu, r.root, RouteChoice{}) // what went direct is an ordinary file
				back("staged")
				if s := r.stats(); s.Loads != 0 || s.Route != "staged" {
					t.Errorf("a load without a direct route went by %+v, want staged", s)
				}
			})
		}
	}
}

// TestRouteIsSuspendedAndResumed walks a route through failures, trials and recovery.
func TestRouteIsSuspendedAndResumed(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(2, 2, 1, 4096), 16, 8<<20)
	way := r.route(RouteChoice{})
	now := time.Unix(1000, 0)
	way.now = func() time.Time { return now }
	ids := r.shuffled(1)
	first := r.put(0, ids[0])
	r.double.Rules("cuFileWrite:code=5030")
	r.mustStore(first)
	load := func(rules string) {
		t.Helper()
		r.double.Rules("")
		r.poison()
		r.double.Rules(rules)
		r.mustLoad([]int{0}, ids)
		r.double.Rules("")
		testenv.OK(t, r.holds(0, ids[0], false))
	}
	const broken = "cuFileRead:code=5030"
	load(broken)
	load("") // not three in a row
	load(broken)
	load(broken)
	if s := r.stats(); s.Suspended != 0 || s.Route != "direct" || s.StoreFallbacks != 1 || s.LoadFallbacks != 3 {
		t.Fatalf("after 3 failures the route is %+v, want direct", s)
	}
	load(broken)
	load(broken) // not tried
	if s := r.stats(); s.Suspended != 1 || s.Route != "staged" || s.LoadFallbacks != 4 {
		t.Fatalf("after 4 failures the route is %+v, want it suspended", s)
	}
	now = now.Add(firstSuspension)
	load(broken) // a probe
	load(broken)
	if s := r.stats(); s.Suspended != 2 || s.LoadFallbacks != 5 {
		t.Fatalf("after a failed probe the route is %+v, want it suspended again", s)
	}
	now = now.Add(firstSuspension)
	load("") // twice as long now
	if s := r.stats(); s.Resumed != 0 || s.Loads != 1 {
		t.Fatalf("before the second suspension ends the route has %+v, want 1 load and no resumption", s)
	}
	now = now.Add(firstSuspension)
	load("")
	if s := r.stats(); s.Resumed != 1 || s.Loads != 2 || s.Route != "direct" {
		t.Fatalf("after the second suspension the route has %+v, want it resumed", s)
	}
}

// TestDirectLiesAreFoundOut: bytes that are wrong by the direct route alone are staged, and the route is left at once.
func TestDirectLiesAreFoundOut(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(4, 4, 1, 100_000), 64, 32<<20)
	way := r.route(RouteChoice{})
	now := time.Unix(1000, 0)
	way.now = func() time.Time { return now }
	r.mustStore(r.put(0, r.shuffled(1)[0]))
	ids := r.shuffled(1)
	for lie := range int64(4) { // a probe that lies is a probe that failed, so the next is twice as far
		r.poison()
		r.double.Rules("cuFileRead:flip=500000")
		for range 2 { // the second is staged
			r.mustLoad([]int{0}, ids)
		}
		r.double.Rules("")
		testenv.NoError(t, r.holds(0, ids[0], false))
		if s := r.stats(); s.Mismatched != lie+1 || s.Suspended != lie+1 || s.Route != "staged" || s.Loads != 0 ||
			way.suspension != firstSuspension<<lie {
			t.Errorf("%+v, left for %v", s, way.suspension)
		}
		now = now.Add(way.suspension)
	}
}

// TestCancelNeedsNoCuFile: cuFile hangs under a load; the cancel completes it all the same, and what comes late goes
// nowhere. A store whose pages were read completes its first half while cuFile hangs.
func TestCancelNeedsNoCuFile(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(2, 2, 1, 4096), 16, 8<<20)
	r.route(RouteChoice{})
	from := r.shuffled(2)
	first := r.put(0, from[0])
	r.double.Rules("cuFileWrite:hang")
	read, published := make(chan Outcome, 1), make(chan Outcome, 1)
	r.queue.Store(&StoreJob{Memory: r.memory, Chunks: []StoreChunk{first}, Read: func(o Outcome) { read <- o },
		Published: func(o Outcome) { published <- o }})
	if o := <-read; len(o.Failed) > 0 {
		t.Fatal(o)
	}
	r.double.Rules("")
	if o := <-published; len(o.Failed) > 0 {
		t.Fatal(o)
	}
	r.poison()
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{deviceKey(0)}, Ranks: 1})
	if err != nil || l.Hits() != 1 {
		t.Fatal(err)
	}
	defer l.Release()
	done := make(chan Outcome, 2)
	r.double.Rules("cuFileRead:hang")
	h := r.queue.Load(&LoadJob{Lease: l, Memory: r.memory, Chunks: []LoadChunk{{Blocks: from[1]}},
		Done: func(o Outcome) { done <- o }})
	testenv.Until(t, "a call of cuFile", func() bool { return r.double.Calls("cuFileRead") > 0 })
	h.Cancel()
	<-h.Fenced()
	if o := <-done; len(o.Failed) != 1 || !errors.Is(o.Failed[0].Err, ErrCancelled) {
		t.Errorf("cancelled load: got %+v, want 1 chunk failed with ErrCancelled", o)
	}
	r.double.Rules("")
	if err := r.engine.Close(); err != nil { // waits for the late read
		t.Fatal(err)
	}
	for plane, p := range r.planes {
		got := make([]byte, p.Size)
		r.on(func(t *gds.Thread) error { return t.Read(got, p.Address) })
		if i := bytes.IndexFunc(got, func(c rune) bool { return c != 0xfffd }); i >= 0 && got[i] != devicePoison {
			t.Errorf("plane %d was touched after the fence", plane)
		}
	}
}

// TestLostGPUOnTheDirectRoute: a sticky error fails what needs the GPU, and blames no file.
func TestLostGPUOnTheDirectRoute(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(2, 2, 1, 4096), 16, 8<<20)
	r.route(RouteChoice{})
	from := r.shuffled(2)
	r.mustStore(r.put(0, from[0]))
	last := r.put(1, from[1])
	r.double.Rules("sums:code=719")
	if out := r.load([]int{0}, from); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrDevice) {
		t.Fatal(out)
	}
	if _, out := r.storeAll(last); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrDevice) {
		t.Fatal(out)
	}
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{deviceKey(0)}, Ranks: 1})
	if err != nil || l.Hits() != 1 {
		t.Error("the file was blamed", err)
	}
	l.Release()
}
