package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/blockmajor"
	"github.com/kvhost/kvhost/plugins/dist"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/plugins/lru"
)

// workshop has the first-party modules of the tests here, compiled once.
var workshop = sync.OnceValues(func() (opt policy.Options, err error) {
	if opt.Dir, err = policytest.Build("lru", "fifo", "fanout"); err != nil && len(dist.Names()) == 0 {
		return opt, err // where there is no toolchain, those that the binary was built with do
	}
	opt.Cache, err = compiled()
	return opt, err
})

// compiled is the cache of modules for all stores of the tests here.
var compiled = sync.OnceValues(policytest.OpenCache)

// handle is a handle for a module that is linked in; nil, the built-in policy, stays nil.
func handle(m *policy.Module) *policy.Handle {
	if m == nil {
		return nil
	}
	return policy.NewHandle(m, "", nil, nil)
}

// use opens a first-party module and counts those that were closed. The caller must release the handle if they are
// counted.
func use(t testing.TB, name string, closed *atomic.Int32, config policy.Config) *policy.Handle {
	t.Helper()
	opt, err := workshop()
	must(t, err)
	m, err := policy.Open(context.Background(), name, opt)
	must(t, err)
	h := policy.NewHandle(m, "", config, func(_ *policy.Module, err error) {
		noError(t, err)
		if closed != nil {
			closed.Add(1)
		}
	})
	if closed == nil {
		t.Cleanup(h.Release)
	}
	return h
}

// swap replaces policies with handles that are the test's to release.
func (f *fixture) swap(ctx context.Context, w Swap) ([]Taken, error) {
	taken, err := f.store.Swap(ctx, w)
	for _, h := range w.Policies {
		if h != nil {
			h.Release()
		}
	}
	return taken, err
}

// files lists the pieces below a root, by path.
func (f *fixture) files() (list []string) {
	f.Helper()
	dir := f.cfg.Roots[0].Path
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if rel := strings.TrimPrefix(path, dir+"/"); err == nil && d.Type().IsRegular() && rel[0] != '.' {
			list = append(list, rel)
		}
		return err
	})
	must(f, err)
	return list
}

// TestManySwaps replaces all policies again and again while clients store and look up, and counts what is left over.
func TestManySwaps(t *testing.T) {
	testenv.Slow(t)
	const rounds, fresh, entries = 60, 10, 64
	var done atomic.Int32
	f := newFixture(t, entries, 1)
	f.mustPut(0)
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	var requests, hits atomic.Int64
	for c := range uint64(3) {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(c, 9))
			for ctx.Err() == nil {
				n := rng.Uint64N(2 * entries)
				requests.Add(1)
				l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: []kv.Key{testKey(n)}})
				if err != nil {
					t.Error(err)
					return
				}
				if l.Hits() == 1 {
					hits.Add(1)
					if _, err := read(l, 0, 0); err != nil {
						t.Error(err)
					}
				} else if err := f.put(n, 0); err != nil && !errors.Is(err, ErrResident) {
					t.Error(err)
				}
				l.Release()
			}
		})
	}
	names := [...]string{"lru", "fifo"}
	modules := [...]*policy.Handle{use(t, names[0], nil, nil), use(t, names[1], nil, nil)}
	swap := func(i int) {
		h := modules[i%2].Acquire()
		if i%fresh == 0 { // a module that nothing else uses, which must be closed afterwards
			h.Release()
			h = use(t, names[i%2], &done, nil)
		}
		w := Swap{Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: h}}
		if _, err := f.swap(t.Context(), w); err != nil {
			t.Fatal(err)
		}
		if i%fresh != 0 {
			return
		}
		w = Swap{From: "fanout"}
		w.Policies[abi.RolePlace] = use(t, "fanout", &done, policy.Config{
			fanout.ConfigWidths: []string{"4/4", "1/1/1"}[i/fresh%2],
		})
		if _, err := f.swap(t.Context(), w); err != nil {
			t.Fatal(err)
		}
	}
	type footprint struct {
		goroutines, descriptors, maps int
		heap                          uint64
	}
	measure := func() footprint {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return footprint{runtime.NumGoroutine(), lines(t, "/proc/self/fd"), lines(t, "/proc/self/maps"), m.HeapAlloc}
	}
	settled := func() footprint {
		for range 12 { // finalizers give memory back, some of it to others
			measure()
		}
		return measure()
	}
	for i := range 16 {
		swap(i)
	}
	before := settled()
	for i := range rounds {
		swap(i)
	}
	after := settled()
	await(t, fmt.Sprintf("nothing is left over from each swap: %+v before, %+v after", before, after), func() bool {
		after = measure()
		return after.goroutines <= before.goroutines+4 && after.descriptors <= before.descriptors+8 &&
			after.maps <= before.maps+64 && after.heap <= before.heap+8<<20
	})
	stop()
	clients.Wait()
	t.Logf("%d swaps, %d requests, %d hits; %+v before, %+v after", rounds, requests.Load(), hits.Load(), before, after)
	if n := len(f.store.catalog.Classes()); n > 40 {
		t.Errorf("%d classes", n)
	}
	if live := f.store.Stats().Policies; len(live) > 4+2 {
		t.Errorf("%d policies in use", len(live))
	}
	f.checkUsed()
}

// lines counts those of a file, or the entries of a directory.
func lines(t *testing.T, name string) int {
	t.Helper()
	if list, err := os.ReadDir(name); err == nil {
		return len(list)
	}
	b, err := os.ReadFile(name)
	must(t, err)
	return strings.Count(string(b), "\n")
}

// TestSwapWhilePut has a piece in flight, and a rank still to come, when its names and layout are replaced.
func TestSwapWhilePut(t *testing.T) {
	f := newFixture(t, 6, 2)
	first, err := f.store.Put(t.Context(), f.request(1, 1, 0))
	must(t, err)
	layout := policy.NativeModule("blocks", []abi.Role{abi.RoleLayout}, func(i guest.Info) (any, error) {
		return blockmajor.New(i)
	})
	plan := f.space.Plan(0)
	for role, u := range map[abi.Role]*policy.Handle{
		abi.RolePlace: use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"}), abi.RoleLayout: handle(layout),
	} {
		w := Swap{From: map[abi.Role]string{abi.RolePlace: "fanout", abi.RoleLayout: "layermajor"}[role]}
		w.Policies[role] = u
		if _, err := f.store.Swap(t.Context(), w); err != nil {
			t.Fatal(err)
		}
	}
	if f.space.Plan(0).Digest() == plan.Digest() {
		t.Error("the layout is the old one")
	}
	must(t, write(first))
	must(t, first.Publish(t.Context()))
	must(t, f.putUnder(1, 1, 1))
	f.mustRead(1)
	f.mustPut(2)
	f.mustRead(2)
	f.restart()
	f.mustRead(1, 2)
	f.checkUsed()
}

// elephant is lru, and hands all that it was told to its successor, which plays it again.
type elephant struct {
	*lru.Policy
	told []abi.Event
}

func newElephant() *policy.Module {
	return policy.NativeModule("elephant", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) {
		p, err := lru.New(i)
		return &elephant{Policy: p}, err
	}).KeepState("elephant/1")
}

func (e *elephant) Events(batch []abi.Event) {
	e.told = append(e.told, batch...)
	e.Policy.Events(batch)
}

func (e *elephant) Save(dst []byte, limit int) ([]byte, error) {
	return append(dst, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(e.told))), len(e.told)*abi.EventSize)...), nil
}

func (e *elephant) Load(state []byte) error {
	told := make([]abi.Event, len(state)/abi.EventSize)
	copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(told))), len(state)), state)
	e.Events(told)
	return nil
}

func TestSwapEvict(t *testing.T) {
	native := func() *policy.Module {
		return policy.NativeModule("lru", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) { return lru.New(i) })
	}
	builtin := func() *policy.Module { return policy.Builtin(abi.RoleEvict) }
	wasm := func() *policy.Module {
		opt, err := workshop()
		must(t, err)
		m, err := policy.Open(t.Context(), "lru", opt)
		must(t, err)
		return m
	}
	for name, c := range map[string]struct {
		from, to func() *policy.Module
		how      evictor.Method
	}{
		"module to native":   {wasm, native, evictor.Replayed},
		"native to module":   {native, wasm, evictor.Replayed},
		"with state":         {newElephant, newElephant, evictor.Loaded},
		"module to module":   {wasm, wasm, evictor.Loaded},
		"built-in to module": {builtin, wasm, evictor.Loaded},
		"module to built-in": {wasm, builtin, evictor.Loaded},
		"without":            {newElephant, native, evictor.Replayed},
	} {
		t.Run(name, func(t *testing.T) {
			done := false
			from := policy.NewHandle(c.from(), "", nil, func(_ *policy.Module, err error) {
				if done = true; err != nil {
					t.Error(err)
				}
			})
			f := newFixture(t, 4, 1, func(cfg *Config) { cfg.Policies.Evict = from })
			from.Release()
			f.mustPut(0, 1, 2, 3)
			f.lookup(0).Release()
			taken, err := f.swap(t.Context(), Swap{
				From: from.Label, Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: handle(c.to())},
			})
			if err != nil || len(taken) != 1 || taken[0].Entries != 4 || taken[0].Handover != c.how {
				t.Fatalf("swap: %+v, error %v, want 4 entries handed over by %v", taken, err, c.how)
			}
			if !done {
				t.Error("the old policy's module was not given back")
			}
			f.mustPut(5)
			if f.has(1) || !f.has(0) || !f.has(5) {
				t.Error("the new policy did not evict the least recently touched")
			}
			f.checkUsed()
		})
	}
}

// TestSwapRefused leaves the old policy where it is, in every root, when a new one cannot be had in one of them.
func TestSwapRefused(t *testing.T) {
	f := newFixture(t, 4, 1, func(c *Config) {
		second := c.Roots[0]
		second.Path = testenv.Dir(t)
		c.Roots = append(c.Roots, second)
	})
	var made, done atomic.Int32
	broken := policy.NativeModule("broken", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) {
		if made.Add(1) == 2 {
			return nil, errors.New("not here")
		}
		return lru.New(i)
	})
	refuse := func() *policy.Handle {
		return policy.NewHandle(broken, "", nil, func(*policy.Module, error) { done.Add(1) })
	}
	if _, err := f.swap(t.Context(),
		Swap{From: "lru", Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: refuse()}}); err == nil ||
		!strings.Contains(err.Error(), "not here") {
		t.Fatal(err)
	}
	if _, err := f.swap(t.Context(),
		Swap{From: "nobody", Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: refuse()}}); !errors.Is(err, ErrNoPolicy) {
		t.Fatal(err)
	}
	for _, p := range f.store.Stats().Policies {
		if p.Name == "broken" || p.Faults > 0 {
			t.Errorf("policy after a swap that was refused: %+v, want the old one without faults", p)
		}
	}
	if done.Load() != 2 {
		t.Errorf("%d of 2 given back", done.Load())
	}
	next := Swap{From: "lru", Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: use(t, "fifo", &done, nil)}}
	if _, err := f.swap(testenv.Context(t), next); err != nil {
		t.Errorf("a swap after one that was refused: %v", err)
	}
	f.mustPut(0, 1, 2, 3)
}

// TestSwapUndone: a policy is ready in one root, has failed in another, and both are left as they were.
func TestSwapUndone(t *testing.T) {
	f := newFixture(t, 4, 1, func(c *Config) {
		second := c.Roots[0]
		second.Path = testenv.Dir(t)
		c.Roots = append(c.Roots, second)
	})
	f.mustPut(0, 1, 2, 3, 4, 5, 6, 7)
	before := fmt.Sprint(f.deciders())
	var done atomic.Int32
	h := policy.NewHandle(openFrail(t), "frail", nil, func(*policy.Module, error) { done.Add(1) })
	b := f.store.evictPolicy(h)
	changes, err := f.store.prepareEvict(t.Context(), &Swap{From: "lru"}, b)
	if err != nil || len(changes) != 2 {
		t.Fatal(len(changes), err)
	}
	late, request := f.keyIn(1), uint32(0)
	for range 10_000 { // more events than it has fuel for
		request++
		l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(late), Request: request})
		must(t, err)
		l.Release()
	}
	_, err = f.store.replace(t.Context(), f.store.cfg.Now(), changes, func() (*catalog.Swap, error) {
		return f.store.catalog.PrepareSwap(t.Context(), "lru", &[abi.Roles]*policy.Handle{}, 0)
	})
	if !errors.Is(err, policy.ErrFuel) || !strings.Contains(err.Error(), f.store.roots[1].Path) {
		t.Fatalf("swap to a policy that is out of fuel in root 1: error %v, want %v there", err, policy.ErrFuel)
	}
	b.Release()
	h.Release()
	if done.Load() != 1 {
		t.Error("the module was not given back")
	}
	if after := fmt.Sprint(f.deciders()); after != before {
		t.Errorf("%s decide in place of %s", after, before)
	}
	// What was touched is younger, as lru has it and fifo has not; and nobody is in the way of the next swap.
	for _, r := range f.store.roots {
		r.Lock()
		if r.Evictor.Stats().Builtin {
			t.Error("something is left of the attempt")
		}
		r.Unlock()
	}
	f.lookup(0).Release()
	if _, err := f.swap(t.Context(),
		Swap{From: "lru", Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: use(t, "fifo", &done, nil)}}); err != nil {
		t.Fatal(err)
	}
	f.checkUsed()
}

// keyIn is a key that a root has.
func (f *fixture) keyIn(root int) uint64 {
	f.Helper()
	for n := range uint64(8) {
		l := f.lookup(n)
		at := l.Root(0)
		l.Release()
		if at == f.store.roots[root].Path {
			return n
		}
	}
	f.Fatalf("root %d has no key", root)
	return 0
}

// deciders are who acts in each root.
func (f *fixture) deciders() (names []string) {
	for _, r := range f.store.roots {
		r.Lock()
		names = append(names, r.Evictor.Active().Label+" "+r.Evictor.Active().Module.Digest())
		r.Unlock()
	}
	return names
}

// TestSwapDoesNotWaitForEver ends with its context while a scan, or another swap that waits for one, is under way.
func TestSwapDoesNotWaitForEver(t *testing.T) {
	f := newFixture(t, 4, 1)
	r := f.root()
	for name, c := range map[string]struct {
		lock   func(context.Context) error
		unlock func()
	}{
		"scan": {r.Evictor.HoldHandovers, r.Evictor.AllowHandovers},
		"swap": {
			func(ctx context.Context) error { return f.store.swapping.Acquire(ctx, 1) },
			func() { f.store.swapping.Release(1) },
		},
	} {
		must(t, c.lock(t.Context()))
		ctx, cancel := context.WithCancel(t.Context())
		var done atomic.Int32
		ended := make(chan error)
		go func() {
			_, err := f.swap(ctx, Swap{
				From: "lru", Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: use(t, "fifo", &done, nil)},
			})
			ended <- err
		}()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) || done.Load() != 1 {
			t.Errorf("%s: %v, %d modules given back", name, err, done.Load())
		}
		c.unlock()
	}
	f.mustPut(0, 1)
}

// resized is the fixture's configuration with another capacity, in entries, of its root.
func (f *fixture) resized(entries uint32) Config {
	next := f.cfg
	next.Roots = slices.Clone(next.Roots)
	next.Roots[0].Capacity, next.Roots[0].MaxEntries = int64(entries)*pieceBytes, entries*8
	return next
}

// A root that becomes smaller evicts what is too much by itself, the least recently used first, and one that grows takes
// more entries than it had slots for. What fails changes nothing.
func TestReloadResizes(t *testing.T) {
	f := newFixture(t, 8, 1)
	f.mustPut(0, 1, 2, 3, 4, 5, 6, 7)
	f.lookup(0).Release()
	if _, err := f.store.Reload(t.Context(), f.resized(4)); err != nil {
		t.Fatal(err)
	}
	await(t, "what is too much is evicted", func() bool { return f.store.Stats().Roots[0].Used <= 4*pieceBytes })
	if st := f.store.Stats().Roots[0]; st.Capacity != 4*pieceBytes || !f.has(0) || !f.has(7) || f.has(1) {
		t.Errorf("%d bytes of %d, not the least recently used are gone", st.Used, st.Capacity)
	}
	f.checkUsed()
	if _, err := f.store.Reload(t.Context(), f.resized(200)); err != nil {
		t.Fatal(err)
	}
	for n := range uint64(150) { // 64 slots were there
		f.mustPut(100 + n)
	}
	if st := f.store.Stats().Roots[0]; st.Entries < 150 || st.MaxEntries != 1600 {
		t.Errorf("%d entries, at most %d", st.Entries, st.MaxEntries)
	}
	f.checkUsed()

	before := f.store.Stats().Roots[0]
	huge := f.resized(100)
	huge.Roots[0].MaxEntries = 1 << 24
	if _, err := f.store.Reload(t.Context(), huge); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
	bad := f.resized(100)
	bad.Policies.Evict = policy.NewHandle(openFrail(t), "frail", policy.Config{"nonsense": "1"}, nil)
	if _, err := f.store.Reload(t.Context(), bad); err == nil {
		t.Error("a policy that cannot start took over")
	}
	if after := f.store.Stats().Roots[0]; after.Capacity != before.Capacity || after.Used != before.Used {
		t.Errorf("%d of %d bytes, %d of %d before", after.Used, after.Capacity, before.Used, before.Capacity)
	}
	if _, err := f.store.Reload(testenv.Context(t), f.resized(100)); err != nil {
		t.Errorf("a reload after those that were refused: %v", err)
	}
}

// shadowStats waits until the shadow has heard of so many keys.
func (f *fixture) shadowStats(name string, keys uint64) ShadowStats {
	f.Helper()
	var found ShadowStats
	await(f, fmt.Sprintf("shadow %s knows of %d keys", name, keys), func() bool {
		list := f.store.Stats().Shadows
		i := slices.IndexFunc(list, func(s ShadowStats) bool { return s.Name == name && s.Keys >= keys })
		if i >= 0 {
			found = list[i]
		}
		return i >= 0
	})
	return found
}

// TestShadow has two shadows of lru: a smaller cache than the live one, and one as large, which must do as it does.
func TestShadow(t *testing.T) {
	builtin := policy.Builtin(0)
	f := newFixture(t, 4, 1, func(c *Config) {
		c.Policies.Shadows = []Shadow{
			{Policy: policy.NewHandle(builtin, "small", nil, nil), Capacity: 2 * pieceBytes},
			{Policy: policy.NewHandle(builtin, "twin", nil, nil)},
		}
	})
	ask := func(n ...uint64) {
		t.Helper()
		l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(n...), Request: uint32(n[0]) + 1})
		must(t, err)
		l.Release()
	}
	ask(0, 1, 2)    // misses: nothing is there
	f.mustPut(0, 1) // both are offered
	ask(0, 1, 2)    // 2 hits; of small's, too
	f.mustPut(2, 3) // small evicts 0 and 1
	ask(0, 1, 2, 3) // 4 hits; small has none, and stores them again: 2 and 3 are left
	ask(2, 3)       // 2 hits, also of small
	twin, small := f.shadowStats("twin", 12), f.shadowStats("small", 12)
	if twin.Hits != 8 || twin.LiveHits != 8 || twin.Entries != 4 || twin.Used != 4*pieceBytes {
		t.Errorf("twin: %+v", twin)
	}
	if small.Hits != 4 || small.LiveHits != 8 || small.Entries != 2 || small.Dropped != 0 {
		t.Errorf("small: %+v", small)
	}
	if err := f.store.addShadow(t.Context(),
		Shadow{Policy: policy.NewHandle(builtin, "twin", nil, nil)}); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
	refuses := policy.NativeModule("refuses", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) {
		return nil, errors.New("not today")
	})
	if err := f.store.SwapShadow(t.Context(),
		Shadow{Policy: policy.NewHandle(refuses, "small", nil, nil), Capacity: 2 * pieceBytes}); err == nil {
		t.Error("a shadow that refuses its settings began")
	}
	if err := f.store.SwapShadow(t.Context(),
		Shadow{Policy: policy.NewHandle(builtin, "nobody", nil, nil)}); !errors.Is(err, ErrNoPolicy) {
		t.Errorf("swap of a shadow that is not there: %v", err)
	}
	before := f.shadowStats("small", 0)
	if err := f.store.SwapShadow(t.Context(),
		Shadow{Policy: policy.NewHandle(builtin, "small", nil, nil), Capacity: 2 * pieceBytes}); err != nil {
		t.Error(err)
	}
	if after := f.shadowStats("small", 0); before.Keys == 0 || after.Keys != 0 || len(f.store.Stats().Shadows) == 0 {
		t.Errorf("a shadow that was swapped has %d keys, it had %d before", after.Keys, before.Keys)
	}
	noError(t, f.store.RemoveShadow("small"))
	if err := f.store.RemoveShadow("small"); !errors.Is(err, ErrNoPolicy) {
		t.Error(err)
	}
	f.lookup(0).Release()
	f.shadowStats("twin", 13)
	f.checkUsed()
}

// TestShadowHearsOfEnds: a request's end reaches the evict policy of a shadow, too.
func TestShadowHearsOfEnds(t *testing.T) {
	w := &witness{}
	f := newFixture(t, 4, 1, func(c *Config) {
		c.Policies.Shadows = []Shadow{{Policy: policy.NewHandle(w.module(), "hears", nil, nil), Capacity: pieceBytes}}
	})
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(0), Request: 7})
	must(t, err)
	l.Release()
	f.store.EndRequest(7, abi.Hints{})
	f.mustPut(0, 1) // the policy is asked for a victim, and gets its events first
	await(t, "the shadow hears of the end", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return slices.ContainsFunc(w.events, func(ev abi.Event) bool { return ev.Op == abi.OpRequestEnd && ev.Request == 7 })
	})
}

// TestShadowFails has a shadow begin anew after a fault, until it has had too many.
func TestShadowFails(t *testing.T) {
	var made atomic.Int32
	wrong := policy.NativeModule("wrong", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) {
		made.Add(1)
		return beyond{}, nil
	})
	f := newFixture(t, 64, 1, func(c *Config) {
		c.Policies.Shadows = []Shadow{{Policy: policy.NewHandle(wrong, "wrong", nil, nil), Capacity: pieceBytes}}
	})
	state := func() ShadowStats { return f.store.Stats().Shadows[0] }
	f.mustPut(0, 1, 2, 3, 4, 5, 6, 7) // of which one fits
	await(t, "it fails twice", func() bool {
		for i := range uint64(8) {
			f.lookup(i).Release()
		}
		return state().Faults >= 2
	})
	if s := state(); s.Faults < 2 || made.Load() < 2 || s.Keys == 0 || s.Err == nil && s.Faults == 0 {
		t.Errorf("%d instances, %+v", made.Load(), s)
	}
	f.checkUsed()
}

// beyond names a slot that cannot be.
type beyond struct{}

func (beyond) Events([]abi.Event) {}
func (beyond) Victims(ask abi.Ask, dst []uint32) int {
	dst[0] = 1<<32 - 2
	return 1
}
