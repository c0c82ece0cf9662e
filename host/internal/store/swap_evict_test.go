package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/plugins/lru"
)

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
			f := newFixture(t, t.TempDir(), 4, 1, func(cfg *Config) { cfg.Policies.Evict = from })
			from.Release()
			f.mustPut(0, 1, 2, 3)
			f.lookup(0).Release()
			taken, err := f.swap(t.Context(), Swap{
				From: from.Label, Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: handle(c.to())},
			})
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
			t.Errorf("%+v", p)
		}
	}
	if done.Load() != 2 {
		t.Errorf("%d of 2 given back", done.Load())
	}
	f.mustPut(0, 1, 2, 3)
}

// TestSwapUndone: a policy is ready in one root, has failed in another, and both are left as they were.
func TestSwapUndone(t *testing.T) {
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) {
		second := c.Roots[0]
		second.Path += "2"
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
		if r.Evictor.Down() {
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
	f := newFixture(t, t.TempDir(), 4, 1)
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
