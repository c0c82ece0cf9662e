package store

import "github.com/kvhost/kvhost/host/internal/store/entries"

// keptChanges is how many changes a reader may be behind; about 8 MB, once somebody reads them.
const keptChanges = 1 << 16

// Changes is the log of entries that become resident and of those that go. Entries of a root that is out of service
// count as resident. One that has copies in several roots is recorded once; but if it is stored while a root that has it
// is out of service, or its root is shared, it may be recorded twice.
func (s *Store) Changes() *entries.ChangeLog { return s.changes }

// Snapshot calls yield with the entries that are resident, as changes without a number, until it returns false. Changes
// during the call may be missing or not: the log has them, from an [entries.ChangeLog.Start] before the call on.
func (s *Store) Snapshot(yield func([]entries.Change) bool) {
	batch := make([]entries.Change, 0, entries.SnapshotStep)
	for _, r := range s.roots {
		for from, more := uint32(0), true; more; from += entries.SnapshotStep {
			if batch, more = r.Snapshot(from, batch[:0]); len(batch) > 0 && !yield(batch) {
				return
			}
		}
	}
}
