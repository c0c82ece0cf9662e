package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/policytest"
	"github.com/kvhost/kvhost/host/policy/sandbox"
	"github.com/kvhost/kvhost/host/store/evictor"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/plugins/dist"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/plugins/lru"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// workshop has the first-party modules of the tests here, compiled once.
var workshop = sync.OnceValues(func() (opt policy.Options, err error) {
	if opt.Dir, err = policytest.Build("lru", "fifo", "fanout"); err != nil && len(dist.Names()) == 0 {
		return opt, err // where there is no toolchain, those that the binary was built with do
	}
	cache, err := os.MkdirTemp("", "kvhost-swap")
	if err == nil {
		opt.Cache, err = sandbox.OpenCache(cache)
	}
	return opt, err
})

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
	if err != nil {
		t.Fatal(err)
	}
	m, err := policy.Open(context.Background(), name, opt)
	if err != nil {
		t.Fatal(err)
	}
	h := policy.NewHandle(m, "", config, func(_ *policy.Module, err error) {
		if err != nil {
			t.Error(err)
		}
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
	if err != nil {
		f.Fatal(err)
	}
	return list
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
		if err != nil {
			t.Fatal(err)
		}
		m, err := policy.Open(t.Context(), "lru", opt)
		if err != nil {
			t.Fatal(err)
		}
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
			f := newFixture(t, t.TempDir(), 4, 1, func(cfg *Config) { cfg.Policies.Evict = from })
			from.Release()
			f.mustPut(0, 1, 2, 3)
			f.lookup(0).Release()
			taken, err := f.swap(t.Context(), Swap{From: from.Label, Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: handle(c.to())}})
			if err != nil || len(taken) != 1 || taken[0].Entries != 4 || taken[0].Handover != c.how {
				t.Fatalf("%+v, %v", taken, err)
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
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) {
		second := c.Roots[0]
		second.Path += "2"
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
	if _, err := f.swap(t.Context(), Swap{From: "lru", Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: refuse()}}); err == nil || !strings.Contains(err.Error(), "not here") {
		t.Fatal(err)
	}
	if _, err := f.swap(t.Context(), Swap{From: "nobody", Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: refuse()}}); !errors.Is(err, ErrNoPolicy) {
		t.Fatal(err)
	}
	for _, p := range f.store.Stats().Policies {
		if p.Name == "broken" || p.Faults > 0 {
			t.Errorf("%+v", p)
		}
	}
	if done.Load() != 2 {
		t.Errorf("%d of 2 given back", done.Load())
	}
	f.mustPut(0, 1, 2, 3)
}

// TestSwapUndone takes a policy over in one root, fails in another, and goes on in both as if nothing had been.
func TestSwapUndone(t *testing.T) {
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) {
		second := c.Roots[0]
		second.Path += "2"
		c.Roots = append(c.Roots, second)
	})
	f.mustPut(0, 1, 2, 3, 4, 5, 6, 7)
	before := fmt.Sprint(f.deciders())
	var done atomic.Int32
	lateFailure := errors.New("at the last moment")
	h := use(t, "fifo", &done, nil)
	b := f.store.evictPolicy(h)
	changes, err := f.store.prepareEvict(t.Context(), &Swap{From: "lru"}, b)
	if err != nil || len(changes) != 2 {
		t.Fatal(len(changes), err)
	}
	changes[1].take = func() (int, error) {
		changes[1].Abandon()
		return 0, lateFailure
	}
	if _, err := takeAll(changes); !errors.Is(err, lateFailure) || !strings.Contains(err.Error(), f.store.roots[1].Path) {
		t.Fatal(err)
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
		if r.Evictor.Down() {
			t.Error("something is left of the attempt")
		}
		r.Unlock()
	}
	f.lookup(0).Release()
	if _, err := f.swap(t.Context(), Swap{From: "lru", Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: use(t, "fifo", &done, nil)}}); err != nil {
		t.Fatal(err)
	}
	f.checkUsed()
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

// TestUndoHearsAll has the old policy back that heard what happened while the new one decided.
func TestUndoHearsAll(t *testing.T) {
	f := newFixture(t, t.TempDir(), 4, 1)
	f.mustPut(0, 1, 2, 3)
	b := f.store.evictPolicy(use(t, "fifo", nil, nil))
	defer b.Release()
	changes, err := f.store.prepareEvict(t.Context(), &Swap{From: "lru"}, b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := takeAll(changes); err != nil {
		t.Fatal(err)
	}
	f.lookup(1).Release()
	f.mustPut(4) // fifo: 0 goes
	f.lookup(2).Release()
	changes[0].Undo()
	f.mustPut(5) // lru: 3 goes, which nobody touched
	if f.has(0) || f.has(3) || !f.has(1) || !f.has(2) || !f.has(4) || !f.has(5) {
		t.Error("lru did not hear of all")
	}
	f.checkUsed()
}

// TestSwapDoesNotWaitForEver ends with its context while a scan, or another swap that waits for one, is under way.
func TestSwapDoesNotWaitForEver(t *testing.T) {
	f := newFixture(t, t.TempDir(), 4, 1)
	r := f.store.roots[0]
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
		if err := c.lock(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var done atomic.Int32
		ended := make(chan error)
		go func() {
			_, err := f.swap(ctx, Swap{From: "lru", Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: use(t, "fifo", &done, nil)}})
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

// TestSwapPlace keeps a naming for as long as it has files, over a restart too, and no longer.
func TestSwapPlace(t *testing.T) {
	flat := func() *policy.Handle { return use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"}) }
	deep := func() *policy.Handle { return use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"}) }
	f := newFixture(t, t.TempDir(), 6, 2, func(c *Config) { c.Policies.Place = flat() })
	f.mustPut(0, 1)
	before := f.files()
	if _, err := f.store.Swap(t.Context(), Swap{From: "fanout", Policies: [abi.Roles]*policy.Handle{abi.RolePlace: deep()}}); err != nil {
		t.Fatal(err)
	}
	f.mustPut(2, 3)
	for n := range uint64(4) {
		f.mustRead(n)
	}
	after := f.files()
	if len(after) != 2*len(before) {
		t.Errorf("%d files became %d", len(before), len(after))
	}
	places := func() string {
		var list []string
		for _, p := range f.store.Stats().Policies {
			if p.Role == abi.RolePlace {
				list = append(list, fmt.Sprintf("%s: %d files, replaced %t", p.Name, p.Files, p.Replaced))
			}
		}
		return strings.Join(list, "; ")
	}
	const both = "fanout: 2 files, replaced false; fanout: 2 files, replaced true"
	equal(t, "place policies", places(), both)
	f.cfg.Policies.Place = deep()
	f.restart()
	for n := range uint64(4) {
		f.mustRead(n)
	}
	equal(t, "place policies after a restart", places(), both)
	st := f.store.Stats().Roots[0]
	equal(t, "Renamed", st.Renamed, 0)
	equal(t, "Recovered", st.Recovered, 8)
	f.mustPut(4, 5, 6, 7) // evicts 0 and 1
	await(t, "the policy goes with the last of its files", func() bool { return places() == "fanout: 6 files, replaced false" })
	if kept, err := filepath.Glob(f.cfg.Roots[0].Path + "/" + pieceformat.PoliciesDir + "/*" + pieceformat.PlaceSuffix); err != nil || len(kept) != 1 {
		t.Errorf("%v kept, %v", kept, err)
	}
	f.checkUsed()
}

// logged counts the warnings that a logger was given, by message.
type logged struct {
	slog.Handler
	mu   sync.Mutex
	seen map[string]int
}

func (l *logged) Enabled(context.Context, slog.Level) bool { return true }
func (l *logged) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logged) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.Level >= slog.LevelWarn {
		l.seen[r.Message]++
	}
	return nil
}

// TestReplacedPlacePolicyNotRemoved: the files of a place policy that has ended cannot be removed, and the log says so.
func TestReplacedPlacePolicyNotRemoved(t *testing.T) {
	faulty := faultfs.New(staging.OS())
	log := &logged{Handler: slog.DiscardHandler, seen: map[string]int{}}
	f := newFixture(t, t.TempDir(), 2, 1, func(c *Config) {
		c.FS, c.Log = faulty, slog.New(log)
		c.Policies.Place = use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"})
	})
	f.mustPut(0)
	faulty.Set(faultfs.MustRules("remove **/policies/*: eio")...)
	w := Swap{From: "fanout"}
	w.Policies[abi.RolePlace] = use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"})
	if _, err := f.store.Swap(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	f.mustPut(1, 2, 3) // evicts 0, the last file with an old name
	await(t, "the log says so, once: the module is still used", func() bool {
		log.mu.Lock()
		defer log.mu.Unlock()
		return log.seen["file that nothing needs not removed; the next start tries again"] == 1
	})
}

// TestSwapWhilePut has a piece in flight, and a rank still to come, when its names and layout are replaced.
func TestSwapWhilePut(t *testing.T) {
	f := newFixture(t, t.TempDir(), 6, 2)
	first, err := f.store.Put(t.Context(), f.request(1, 1, 0))
	if err != nil {
		t.Fatal(err)
	}
	layout := policy.NativeModule("blocks", []abi.Role{abi.RoleLayout}, func(guest.Info) (any, error) { return blockMajor{}, nil })
	plan := f.space.Plan(0)
	for role, u := range map[abi.Role]*policy.Handle{abi.RolePlace: use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"}), abi.RoleLayout: handle(layout)} {
		w := Swap{From: map[abi.Role]string{abi.RolePlace: "fanout", abi.RoleLayout: "layermajor"}[role]}
		w.Policies[role] = u
		if _, err := f.store.Swap(t.Context(), w); err != nil {
			t.Fatal(err)
		}
	}
	if f.space.Plan(0).Digest() == plan.Digest() {
		t.Error("the layout is the old one")
	}
	if err := write(first); err != nil {
		t.Fatal(err)
	}
	if err := first.Publish(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.putUnder(1, 1, 1); err != nil {
		t.Fatal(err)
	}
	f.mustRead(1)
	f.mustPut(2)
	f.mustRead(2)
	f.restart()
	f.mustRead(1)
	f.mustRead(2)
	f.checkUsed()
}

// TestManySwaps replaces all policies again and again while clients store and look up, and counts what is left over.
func TestManySwaps(t *testing.T) {
	rounds, fresh := 1000, 10
	if raceDetector {
		rounds, fresh = 40, 8
	}
	const entries = 64
	var done atomic.Int32
	f := newFixture(t, t.TempDir(), entries, 1)
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
				l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: []chunk.Key{testKey(n)}})
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
		w.Policies[abi.RolePlace] = use(t, "fanout", &done, policy.Config{fanout.ConfigWidths: []string{"4/4", "1/1/1"}[i/fresh%2]})
		if _, err := f.swap(t.Context(), w); err != nil {
			t.Fatal(err)
		}
	}
	replaced := func(p PolicyStats) bool { return p.Replaced }
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
		await(t, "the files that replaced modules named are gone", func() bool { // a module's 12 MB stay until then
			return !slices.ContainsFunc(f.store.Stats().Policies, replaced)
		})
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
			after.maps <= before.maps+64 && after.heap <= before.heap+32<<20
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
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "\n")
}
