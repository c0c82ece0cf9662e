package entries

import (
	"iter"
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// Eviction is an entry that is being removed, with the names of its files.
type Eviction struct {
	Slot   uint32
	Class  *catalog.Class
	Key    kv.Key
	Pieces uint64
	Names  []pieceformat.Name // names of pieces that are not built-in ones
}

// Name returns the path of a rank's file below the root.
func (v *Eviction) Name(rank uint32) string { return v.Class.NameOf(v.Names, &v.Key, rank) }

// Ranks iterates over the ranks in a set of pieces.
func Ranks(pieces uint64) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for ; pieces != 0; pieces &= pieces - 1 {
			if !yield(uint32(bits.TrailingZeros64(pieces))) {
				return
			}
		}
	}
}

// BeginEvict begins to remove an entry: the policy gets REMOVE and lookups miss. The caller must then unlink the files and call
// FinishEvict.
func (s *Set) BeginEvict(slot uint32) Eviction {
	e := s.Index.At(slot)
	v := Eviction{
		Slot: slot, Class: s.ClassOf(slot), Key: s.Index.Key(slot), Pieces: s.Index.Pieces(slot), Names: s.Index.NamesOf(slot),
	}
	if e.Is(index.Moving) {
		s.Moves.goes(slot)
	}
	s.Prefetched.goes(slot)
	announced := e.Is(index.Announced)
	e.Set(index.Evicting)
	e.Unset(index.Announced)
	if e.Is(index.Complete) {
		s.uncompleted(slot)
	}
	if s.scanning {
		s.removed[s.Index.Fingerprint(slot)] = struct{}{}
	}
	s.Account.Leave(capacity.Entries, s.Index.Bytes(slot))
	f := s.flights[slot]
	f.unlinking = true
	s.flights[slot] = f
	if announced { // otherwise a scan has found the entry, and the policy does not know it yet
		s.Evictor.Tell(abi.OpRemove, slot, s.Index.Fingerprint(slot), 0)
	}
	return v
}

// FinishEvict ends an eviction after the files were unlinked. Files that could not be unlinked must be booked elsewhere by
// then.
func (s *Set) FinishEvict(v *Eviction) {
	f := s.flights[v.Slot]
	f.unlinking = false
	s.flights.set(v.Slot, f)
	s.reap(v.Slot)
}

// Revive undoes BeginEvict because the files could not be unlinked. The entry is served as before.
func (s *Set) Revive(v *Eviction) {
	e := s.Index.At(v.Slot)
	f := s.flights[v.Slot]
	f.unlinking = false
	s.flights.set(v.Slot, f)
	if e.Is(index.Detached) { // forgotten in between
		s.reap(v.Slot)
		return
	}
	e.Unset(index.Evicting)
	s.Account.Leave(capacity.Entries, -s.Index.Bytes(v.Slot))
	if e.Is(index.Complete) {
		s.completed(v.Slot, kv.Root)
	}
	if s.scanning {
		delete(s.removed, s.Index.Fingerprint(v.Slot))
	} else {
		s.Evictor.Announce(abi.OpResident, v.Slot, s.Index.Fingerprint(v.Slot), 0)
	}
	s.reaped.Broadcast()
}

// Evict removes an entry if it still matches its mark. unlink removes its files. Evict takes the lock, but not while unlink
// runs.
func (s *Set) Evict(m Mark, unlink func(*Eviction)) {
	s.Lock()
	if !s.Stands(m) {
		s.Unlock()
		return
	}
	v := s.BeginEvict(m.Slot)
	s.Unlock()
	unlink(&v)
	s.Lock()
	s.FinishEvict(&v)
	s.Unlock()
}

// Release takes bytes of an entry that is being removed out of the account, because the file is booked elsewhere. It takes at
// most the bytes of the entry, and returns their number.
func (s *Set) Release(v *Eviction, most int64) int64 {
	n := min(most, s.Index.Bytes(v.Slot))
	Rebook(s, v.Slot, s.Index.Bytes(v.Slot)-n)
	return n
}

// Forget removes an entry from the table at once, without regard to its files. Running loads and puts find it gone.
func Forget(s *Set, slot uint32) {
	e := s.Index.At(slot)
	if !e.Is(index.Evicting) {
		v := s.BeginEvict(slot)
		f := s.flights[slot]
		f.unlinking = false
		s.flights.set(v.Slot, f)
	}
	if !e.Is(index.Detached) {
		s.Index.Detach(slot)
		s.reaped.Broadcast()
	}
	if !s.flights[slot].unlinking { // otherwise FinishEvict does it
		s.reap(slot)
	}
}

// reap completes the removal of an evicted entry as far as possible. The entry leaves the table when none of its files is being
// written or unlinked. Its bytes and slot are freed when it has no pin, since unlinked files use space while they are open.
func (s *Set) reap(slot uint32) {
	e := s.Index.At(slot)
	if !e.Is(index.Evicting) {
		return
	}
	if !e.Is(index.Detached) {
		if s.Busy(slot) {
			return
		}
		s.Index.Detach(slot)
		s.reaped.Broadcast()
	}
	if e.Pins() == 0 {
		s.Account.Leave(capacity.Entries, -s.Index.Bytes(slot))
		s.Account.Release(s.Index.Owner(slot).Tenant, s.Index.Bytes(slot))
		s.ClassOf(slot).Release()
		s.Index.Release(slot)
		s.reaped.Broadcast()
	}
}

// WakeJoiners wakes the puts that wait in Join for an entry to leave the table.
func (s *Set) WakeJoiners() { s.reaped.Broadcast() }

// Unpin ends a pin of an entry.
func (s *Set) Unpin(m Mark) { s.UnpinAt(m.Slot, m.Fingerprint, s.cfg.Clock()) }

// UnpinAt is Unpin with the time given.
func (s *Set) UnpinAt(slot uint32, fp, now uint64) {
	if !s.Index.Unpin(slot) {
		return
	}
	e := s.Index.At(slot)
	if e.Is(index.Evicting) {
		s.reap(slot)
		return
	}
	if e.Is(index.Announced) { // otherwise the entry leaves, and the pin was for a host that it was offered to
		s.Evictor.Post(abi.OpUnpin, slot, e, fp, &evictor.Cause{Tenant: s.TenantOf(slot), Time: now})
	}
}
