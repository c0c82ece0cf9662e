package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sys/unix"
)

// The ways of tests into a store's roots. The first root is meant where none is named.

func (f *fixture) root() *root         { return f.store.roots[0] }
func (f *fixture) check() error        { return f.root().check() }
func (f *fixture) idle() error         { return f.root().idle() }
func (f *fixture) own() *ownRoot       { return ownOf(f.root()) }
func (f *fixture) shared() *sharedRoot { return f.root().kind.(*sharedRoot) }

// ownOf is the part of a root that evicts for itself.
func ownOf(r *root) *ownRoot {
	if m, ok := r.kind.(memoryRoot); ok {
		return m.ownRoot
	}
	return r.kind.(*ownRoot)
}

// rested waits until no eviction is under way, and lets none begin before resume is called.
func (f *fixture) rested() (resume func()) {
	f.Helper()
	for _, r := range f.store.roots {
		f.must(ownOf(r).evicting.Acquire(context.Background(), 1))
	}
	return func() {
		for _, r := range f.store.roots {
			r.kind.endTurn()
		}
	}
}

// maintain does a part of the root's own work.
func (f *fixture) maintain(part Task) {
	f.Helper()
	f.must(f.store.Maintain(context.Background(), 0, part))
}

// drop removes the entry of a key, as one that is not what the index says.
func (f *fixture) drop(n uint64) { f.root().drop(f.markOf(n), 0) }

// builtin is the file of a piece of group 0 under the built-in name.
func (f *fixture) builtin(k kv.Key) string { return f.root().path("", f.space.Class(0), &k, 0) }

// takeOut takes a root out of service.
func (f *fixture) takeOut(root int) {
	f.store.roots[root].Health.TakeOut("test", unix.EIO, "none")
}

// check compares a root's index with itself and with its account. The lock is not held.
func (r *root) check() error {
	r.Lock()
	defer r.Unlock()
	kept, release := r.Quarantine.Hold()
	defer release()
	return r.Check(kept)
}

// idle checks that nothing is pinned, in flight or leaving.
func (r *root) idle() error {
	if err := r.check(); err != nil {
		return err
	}
	r.Lock()
	defer r.Unlock()
	if n := r.InFlight(); n > 0 {
		return fmt.Errorf("%d entries are in flight", n)
	}
	var err error
	r.Index.Each(func(slot uint32, e *index.Entry) {
		if e.Pins() != 0 || e.Any(index.Evicting|index.Detached) {
			err = fmt.Errorf("slot %d: %d pins, state %#x", slot, e.Pins(), e.State())
		}
	})
	return err
}
