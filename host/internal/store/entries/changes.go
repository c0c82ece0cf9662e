package entries

import (
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

// SnapshotStep is how many slots Snapshot looks at.
const SnapshotStep = 1024

// Snapshot appends the resident entries of some slots. It reports whether there are slots after them. It takes the
// lock.
func (s *Set) Snapshot(from uint32, batch []Change) (_ []Change, more bool) {
	s.Lock()
	defer s.Unlock()
	end := min(from+SnapshotStep, s.Index.High())
	for slot := from; slot < end; slot++ {
		if e := s.Index.At(slot); e.Is(index.Live) && e.Is(index.Complete) && !e.Any(index.Evicting|index.Detached) {
			batch = append(batch, s.change(Stored, slot, kv.Root))
		}
	}
	return batch, end < s.Index.High()
}

func (s *Set) change(kind ChangeKind, slot uint32, parent kv.Key) Change {
	cl := s.ClassOf(slot)
	return Change{
		Kind: kind, Namespace: cl.Namespace.Digest, Group: cl.Group, Key: s.Index.Key(slot), Parent: parent,
	}
}

// completed counts an entry that has all its pieces.
func (s *Set) completed(slot uint32, parent kv.Key) {
	s.complete++
	if first := s.cfg.Copies == nil || s.cfg.Copies.add(s.Index.Fingerprint(slot)); first && s.cfg.Changes.On() {
		s.cfg.Changes.Add(s.change(Stored, slot, parent))
	}
}

// uncompleted counts an entry that had all its pieces and goes.
func (s *Set) uncompleted(slot uint32) {
	s.complete--
	if last := s.cfg.Copies == nil || s.cfg.Copies.remove(s.Index.Fingerprint(slot)); last && s.cfg.Changes.On() {
		s.cfg.Changes.Add(s.change(Evicted, slot, kv.Root))
	}
}
