package store

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
)

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
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) {
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
	if twin.Hits != 8 || twin.LiveHits != 8 || twin.Entries != 4 || twin.Evictions != 0 || twin.Used != 4*pieceBytes {
		t.Errorf("twin: %+v", twin)
	}
	if small.Hits != 4 || small.LiveHits != 8 || small.Entries != 2 || small.Evictions != 6 || small.Dropped != 0 {
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

// TestShadowFails has a shadow begin anew after a fault, until it has had too many.
func TestShadowFails(t *testing.T) {
	var made atomic.Int32
	wrong := policy.NativeModule("wrong", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) {
		made.Add(1)
		return beyond{}, nil
	})
	f := newFixture(t, t.TempDir(), 64, 1, func(c *Config) {
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
