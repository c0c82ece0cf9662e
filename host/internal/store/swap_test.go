package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/dist"
	"github.com/kvhost/kvhost/plugins/fanout"
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
	must(f, err)
	return list
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
