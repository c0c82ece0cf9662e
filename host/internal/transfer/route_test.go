package transfer

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// asked is a route that checks what a refusal must leave alone, and notes the calls.
type asked struct {
	route
	name string
	log  *askLog
}

type askLog struct {
	mu      sync.Mutex
	calls   []string
	refused func(name string) // is called for each load that a route refuses
}

// watchRoutes notes each call of the engine's routes. Call it while no job runs.
func (r *deviceRig) watchRoutes(refused func(name string)) *askLog {
	log := &askLog{refused: refused}
	for i, name := range []string{"memory", "direct", "staged"} {
		r.engine.routes[i] = asked{r.engine.routes[i], name, log}
	}
	return log
}

func (l *askLog) note(name string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		name += " takes"
	case errors.Is(err, errNotHere):
		name += " refuses"
	default:
		name += " fails"
	}
	l.calls = append(l.calls, name)
}

// take returns the calls since the last time.
func (l *askLog) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	calls := l.calls
	l.calls = nil
	return calls
}

func (a asked) store(t *storeTask, f staging.File) error {
	before, statErr := f.Stat()
	err := a.route.store(t, f)
	if errors.Is(err, errNotHere) {
		if after, err := f.Stat(); err != nil || statErr != nil || after.Size != before.Size || t.fence.chunks[t.index].settled {
			panic(fmt.Sprintf("%s refused a put and left a file of %d bytes for %d, settled %t, %v", a.name, after.Size,
				before.Size, t.fence.chunks[t.index].settled, errors.Join(statErr, err)))
		}
	}
	a.log.note(a.name, err)
	return err
}

func (a asked) load(l *loading) error {
	err := a.route.load(l)
	if errors.Is(err, errNotHere) {
		if l.head != nil || l.source != nil || l.done != 0 || l.last != nil || l.held != nil {
			panic(fmt.Sprintf("%s refused a piece and left %+v", a.name, l))
		}
		a.log.refused(a.name)
	}
	a.log.note(a.name, err)
	return err
}

// Routes are asked in their order until one takes the piece. One that refuses has written nothing.
func TestRoutesAreAskedInOrder(t *testing.T) {
	testenv.Slow(t)
	calls := map[string][]string{
		"memory": {"memory takes"},
		"direct": {"memory refuses", "direct takes"},
		"staged": {"memory refuses", "direct refuses", "staged takes"},
	}
	everyRoute(t, func(t *testing.T, r *routeRig) {
		log := r.watchRoutes(func(string) { r.hold(nil, nil) })
		r.store(1)
		if got := log.take(); !slices.Equal(got, calls[r.route]) {
			t.Errorf("a store: %q, want %q", got, calls[r.route])
		}
		for _, by := range []*Layers{nil, {}} {
			r.poison()
			ids := r.shuffled(1)
			if out := r.loadTo(r.queue, r.from, []int{0}, ids, by); len(out.Failed) > 0 {
				t.Fatalf("failed: %+v, want none", out.Failed)
			}
			if got, want := log.take(), calls[r.routeBy(by)]; !slices.Equal(got, want) {
				t.Errorf("a load, by layers %t: %q, want %q", by != nil, got, want)
			}
			r.hold(map[int][]uint32{0: ids[0]}, nil)
		}
	})
}

// Whatever makes the direct route refuse a piece, no byte is in the pages when the staged route is asked, and the slot and
// the attempt are given back.
func TestDirectRefusesWithCleanPages(t *testing.T) {
	for _, c := range []struct{ name, store, load string }{
		{name: "no slot", store: "cuMemAlloc_v2:code=2", load: "cuMemAlloc_v2:code=2"},
		{name: "cuFile fails", load: "cuFileRead:code=5030"},
		{name: "cuFile reads less", load: "cuFileRead:short=8192"},
		{name: "no checksums", load: "sums:code=701"},
		{name: "wrong head", load: "cuFileRead:flip=100"},
		{name: "wrong table", load: "cuFileRead:flip=4104"},
		{name: "wrong payload", load: "cuFileRead:flip=500000"},
		{name: "last wrong byte", load: "cuFileRead:flip=1607000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("KVHOST_TEST_GPU", "")
			d := newDeviceRig(t, kv.Uniform(4, 4, 1, 100_000), 24, 32<<20)
			way := d.route(RouteChoice{})
			r := &routeRig{deviceRig: d, from: d.memory, queue: d.queue}
			log := r.watchRoutes(func(name string) {
				if name == "direct" {
					r.double.Rules("") // pages are read by the same calls
					r.hold(nil, nil)
				}
			})
			chunks := []StoreChunk{r.put(0, r.shuffled(1)[0])}
			r.double.Rules(c.store)
			if _, out := r.storeFrom(r.queue, r.from, chunks...); len(out.Failed) > 0 {
				t.Fatalf("failed: %+v, want none", out.Failed)
			}
			r.double.Rules("")
			want := []string{"memory refuses", "direct refuses", "staged takes"}
			if got := log.take(); c.store != "" && !slices.Equal(got, want) {
				t.Errorf("a store: %q, want %q", got, want)
			}
			way.mu.Lock()
			way.probing, way.until = false, way.now().Add(-1) // so that the load is a probe, which a refusal must end
			way.mu.Unlock()
			r.poison()
			ids := r.shuffled(1)
			r.double.Rules(c.load)
			if out := r.loadTo(r.queue, r.from, []int{0}, ids, nil); len(out.Failed) > 0 {
				t.Fatalf("failed: %+v, want none", out.Failed)
			}
			r.double.Rules("")
			if got := log.take(); !slices.Equal(got, want) {
				t.Errorf("a load: %q, want %q", got, want)
			}
			r.hold(map[int][]uint32{0: ids[0]}, nil)
			r.idle()
			if way.probing {
				t.Error("the probe has no end")
			}
		})
	}
}

// A compressed piece that was written to memory by parts, as another level sends it there, is decoded from where it is.
func TestMemoryTakesPiecesThatOthersCompressed(t *testing.T) {
	d, _ := newMemoryRig(t, kv.Uniform(4, 4, 1, 100_000), 24, compressed)
	d.float = true
	r := &routeRig{deviceRig: d, from: d.memory, queue: d.queue}
	routes := r.engine.routes
	r.engine.routes = routes[1:]
	r.store(2)
	r.engine.routes = routes
	if s := r.deviceRig.store.Compression()[0]; s.Encoded.Pages != 2*r.geo.PageBytes() {
		t.Fatalf("%d page bytes are compressed, want %d", s.Encoded.Pages, 2*r.geo.PageBytes())
	}
	log := r.watchRoutes(func(string) { r.hold(nil, nil) })
	want := []string{"memory takes"}
	for _, by := range []*Layers{nil, {}} {
		r.poison()
		ids := r.shuffled(1)
		if out := r.loadTo(r.queue, r.from, []int{1}, ids, by); len(out.Failed) > 0 {
			t.Fatalf("failed: %+v, want none", out.Failed)
		}
		if got := log.take(); !slices.Equal(got, want) {
			t.Errorf("a load: %q, want %q", got, want)
		}
		r.hold(map[int][]uint32{1: ids[0]}, nil)
	}
}

// A route that takes a piece neither asks the next one nor hides an error of its own.
func TestARouteThatFailsIsTheLast(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(2, 2, 1, 4096), 16, 8<<20)
	r.route(RouteChoice{})
	ids := r.shuffled(2)
	r.mustStore(r.put(0, ids[0]))
	log := r.watchRoutes(func(string) {})
	broken := errors.New("broken")
	r.engine.routes[1] = asked{failing{broken}, "direct", log}
	want := []string{"memory refuses", "direct fails"}
	if out := r.load([]int{0}, ids[:1]); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, broken) {
		t.Errorf("a load failed with %+v, want %v", out.Failed, broken)
	}
	if got := log.take(); !slices.Equal(got, want) {
		t.Errorf("a load: %q, want %q", got, want)
	}
	if _, out := r.storeAll(r.put(1, ids[1])); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, broken) {
		t.Errorf("a store failed with %+v, want %v", out.Failed, broken)
	}
	if got := log.take(); !slices.Equal(got, want) {
		t.Errorf("a store: %q, want %q", got, want)
	}
}

// failing is a route that takes every piece and fails.
type failing struct{ err error }

func (f failing) store(*storeTask, staging.File) error { return f.err }
func (f failing) load(*loading) error                  { return f.err }
