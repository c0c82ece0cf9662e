package store

import (
	"errors"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/policy"
)

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
	f := newFixture(t, t.TempDir(), 8, 1)
	f.mustPut(0, 1, 2, 3, 4, 5, 6, 7)
	f.lookup(0).Release()
	if _, err := f.store.Reload(t.Context(), f.resized(4)); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); f.store.Stats().Roots[0].Used > 4*pieceBytes; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes are used", f.store.Stats().Roots[0].Used)
		}
	}
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
}
