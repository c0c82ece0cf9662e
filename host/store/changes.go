package store

import (
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/changelog"
	"github.com/kvhost/kvhost/host/store/index"
)

// keptChanges is how many changes a reader may be behind; about 8 MB, once somebody reads them.
const keptChanges = 1 << 16

// Changes is the log of entries that become resident and of those that go. Entries of a root that is out of service
// count as resident. An entry whose root was shared may be recorded twice.
func (s *Store) Changes() *changelog.Log { return s.changes }

// snapshotStep is how many slots are looked at under a root's lock at a time.
const snapshotStep = 1024

// Snapshot calls yield with the entries that are resident, as changes without a number, until it returns false. What
// changes meanwhile may be missing or not: the log tells, from a [changelog.Log.Start] before the call on.
func (s *Store) Snapshot(yield func([]changelog.Change) bool) {
	batch := make([]changelog.Change, 0, snapshotStep)
	for _, r := range s.roots {
		for from, more := uint32(0), true; more; from += snapshotStep {
			if batch, more = r.snapshot(from, batch[:0]); len(batch) > 0 && !yield(batch) {
				return
			}
		}
	}
}

// snapshot appends the resident entries of some slots. It reports whether there are slots after them.
func (r *entries) snapshot(from uint32, batch []changelog.Change) (_ []changelog.Change, more bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	end := min(from+snapshotStep, r.x.High())
	for slot := from; slot < end; slot++ {
		if e := r.x.At(slot); e.Is(index.Live) && e.Is(index.Complete) && !e.Any(index.Evicting|index.Detached) {
			batch = append(batch, r.change(changelog.Stored, slot, chunk.Root))
		}
	}
	return batch, end < r.x.High()
}

func (r *entries) change(kind changelog.Kind, slot uint32, parent chunk.Key) changelog.Change {
	cl := r.classOf(slot)
	return changelog.Change{
		Kind: kind, Namespace: cl.Namespace.Digest, Group: cl.Group, Key: r.x.Key(slot), Parent: parent,
	}
}

// completed counts an entry that has all its pieces. The caller holds mu.
func (r *entries) completed(slot uint32, parent chunk.Key) {
	r.complete++
	if r.store.changes.On() {
		r.store.changes.Add(r.change(changelog.Stored, slot, parent))
	}
}

// uncompleted counts an entry that had all its pieces and goes. The caller holds mu.
func (r *entries) uncompleted(slot uint32) {
	r.complete--
	if r.store.changes.On() {
		r.store.changes.Add(r.change(changelog.Evicted, slot, chunk.Root))
	}
}
