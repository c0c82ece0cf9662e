package entries

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// An entry can be copied to another level while it is served. The evict policy names entries that should leave their root ahead
// of need. The policy forgets such an entry, and the entry waits, still served, until its bytes are needed. If a lookup finds
// it before that, it stays, and the policy is told about it again. A put that needs room therefore never waits for a copy:
// entries that have their copy go first, and then the entries with the fewest hits.

// Move is an entry that is being copied or waits for its copy.
type Move struct {
	Mark
	// Changed is called with the lock of the set held when the value of the move has risen, or when the move is no longer
	// wanted. It may be nil.
	Changed func()

	gone    atomic.Bool
	ended   atomic.Bool   // the requester no longer wants the copy
	leaving atomic.Bool   // copy of leaves that is read without the lock
	hits    atomic.Uint32 // hits of the entry
	leaves  bool          // the entry leaves, and the policy no longer knows it
	through bool          // the entry is copied whether it leaves or not
	settled bool          // for an entry that leaves: nothing more is done before it goes
	pins    uint8         // pins of the running copy
	bytes   int64
}

// Gone reports whether the entry has been removed, so that no copy is wanted. It needs no lock.
func (m *Move) Gone() bool { return m.gone.Load() }

// Cancel records that the requester no longer wants the copy. It needs no lock.
func (m *Move) Cancel() { m.ended.Store(true) }

// Cancelled reports whether the copy is not wanted. It needs no lock.
func (m *Move) Cancelled() bool { return m.ended.Load() || m.Gone() }

// Worth returns the hits of the entry and whether it is about to leave. It needs no lock.
func (m *Move) Worth() (hits uint32, leaves bool) { return m.hits.Load(), m.leaving.Load() }

func (m *Move) changed() {
	if m.Changed != nil {
		m.Changed()
	}
}

// Moves holds the moves of a set's entries. It is guarded by the set's lock.
type Moves struct {
	*Set
	of      map[uint32]*Move // by slot
	leaving []*Move          // in the policy's order; may contain moves of entries that stay after all
	bytes   int64            // bytes of the entries that leave
	leavers int              // number of entries that leave
	settled int              // number of settled ones among them
}

// Leave makes an entry leave that the policy has named. It returns a move that must be offered. It returns nil if the entry
// already waits for its copy, or if it cannot leave now, for example while it is copied nearer.
func (s *Moves) Leave(slot uint32) *Move {
	e, m := s.Index.At(slot), s.of[slot]
	if e.Is(index.Evicting) || e.Pins() != 0 || s.Busy(slot) || m != nil && (m.leaves || !m.through) {
		return nil
	}
	fresh := m == nil
	if fresh {
		m = s.begin(slot)
	}
	m.leaves, m.bytes = true, s.Index.Bytes(slot)
	m.leaving.Store(true)
	if len(s.leaving) > 2*s.leavers+64 {
		s.leaving = slices.DeleteFunc(s.leaving, func(m *Move) bool { return !s.leaves(m) })
	}
	s.leaving = append(s.leaving, m)
	s.leavers++
	s.bytes += m.bytes
	if e.Is(index.Announced) {
		e.Unset(index.Announced)
		s.Evictor.Tell(abi.OpRemove, slot, m.Fingerprint, 0)
	}
	if !fresh {
		m.changed()
		return nil
	}
	return m
}

// Through starts a move to the next level that continues whether the entry leaves or not. It is otherwise like Copy.
func (s *Moves) Through(slot uint32) *Move {
	m := s.Copy(slot)
	if m != nil {
		m.through = true
	}
	return m
}

// Copy starts a move of an entry that stays. It returns nil if the entry is being moved already or is not complete.
func (s *Moves) Copy(slot uint32) *Move {
	e := s.Index.At(slot)
	if e.Any(index.Moving|index.Evicting) || !e.Is(index.Complete) {
		return nil
	}
	return s.begin(slot)
}

// Take is Copy for a caller that copies the entry at once. It cancels a copy that only waits.
func (s *Moves) Take(slot uint32) *Move {
	s.Forgo(slot)
	return s.Copy(slot)
}

// Forgo cancels a copy to a nearer level that has not begun.
func (s *Moves) Forgo(slot uint32) {
	if m := s.of[slot]; m != nil && m.pins == 0 && !m.leaves && !m.through {
		s.forget(m)
		m.Cancel()
		m.changed()
	}
}

func (s *Moves) begin(slot uint32) *Move {
	m := &Move{Mark: Mark{slot, s.Index.Fingerprint(slot)}}
	m.hits.Store(s.Hits.Of(slot))
	if s.of == nil {
		s.of = map[uint32]*Move{}
	}
	s.of[slot] = m
	s.Index.At(slot).Set(index.Moving)
	return m
}

// BeginCopy pins the entry of a move for the copy. It returns false if the entry is gone, was requested again before its copy
// began, or is not complete.
func (s *Moves) BeginCopy(m *Move) bool {
	if s.of[m.Slot] != m || m.gone.Load() || m.pins > 0 || s.Busy(m.Slot) ||
		!s.Index.At(m.Slot).Is(index.Complete) {
		return false
	}
	m.pins = 1
	if m.leaves {
		s.Index.Pin(m.Slot)
	} else {
		s.Evictor.Pin(m.Slot, m.Fingerprint, 0)
	}
	return true
}

// EndCopy ends a move, whether or not BeginCopy was called. An entry that leaves can go now.
func (s *Moves) EndCopy(m *Move) {
	if m.leaves && !m.gone.Load() {
		m.settled = true
		s.settled++
	} else {
		s.forget(m)
	}
	s.PauseCopy(m)
}

// PauseCopy undoes BeginCopy. The move continues.
func (s *Moves) PauseCopy(m *Move) {
	was := m.pins
	m.pins = 0
	switch {
	case was == 0:
	case m.leaves && !s.Index.At(m.Slot).Is(index.Evicting):
		s.Index.Unpin(m.Slot) // the policy does not know about this pin
	default:
		s.Unpin(m.Mark)
	}
}

// stay keeps an entry that was about to leave, because it is wanted.
func (s *Moves) stay(slot uint32) {
	m := s.of[slot]
	if m == nil || !m.leaves {
		return
	}
	settled := m.settled
	s.stop(m)
	m.leaves, m.settled = false, false
	m.leaving.Store(false)
	e := s.Index.At(slot)
	if !e.Is(index.Announced) {
		s.Evictor.Announce(abi.OpResident, slot, m.Fingerprint, 0)
	}
	if e.Pins() > 0 {
		s.Evictor.Post(abi.OpPin, slot, e, m.Fingerprint, &evictor.Cause{Tenant: s.TenantOf(slot), Time: s.cfg.Clock()})
	}
	if m.pins == 0 && (!m.through || settled) {
		s.forget(m)
		m.Cancel()
		m.changed()
	}
}

// forget removes a move from its entry, unless the entry has another move.
func (s *Moves) forget(m *Move) {
	if s.of[m.Slot] == m {
		delete(s.of, m.Slot)
		s.Index.At(m.Slot).Unset(index.Moving)
	}
}

// goes cancels the move of an entry that is being removed.
func (s *Moves) goes(slot uint32) {
	m := s.of[slot]
	m.gone.Store(true)
	if m.leaves {
		s.stop(m)
	}
	s.forget(m)
	m.changed()
}

// stop removes a move from the sums of the moves that leave.
func (s *Moves) stop(m *Move) {
	s.bytes -= m.bytes
	s.leavers--
	if m.settled {
		s.settled--
	}
}

// KeepAll keeps all entries that were about to leave.
func (s *Moves) KeepAll() {
	for _, m := range s.leaving {
		if s.of[m.Slot] == m {
			s.stay(m.Slot)
		}
	}
	s.leaving = nil
}

// Leaving returns the bytes of entries that leave.
func (s *Moves) Leaving() int64 { return s.bytes }

// LeavingOf returns the bytes of a tenant's entries that leave.
func (s *Moves) LeavingOf(tenant uint32) (bytes int64) {
	for _, m := range s.leaving {
		if s.leaves(m) && s.TenantOf(m.Slot) == tenant {
			bytes += m.bytes
		}
	}
	return bytes
}

// NextLeaving returns the entry that should go first among those that leave, or None. If tenant is not None, it considers only
// entries of the tenant. Settled entries go first, then those with the fewest hits. Entries that are being read stay. If spares
// is not 0, unsettled entries with at least spares hits stay as well.
func (s *Moves) NextLeaving(tenant, spares uint32) (slot uint32, settled bool) {
	for len(s.leaving) > 0 && !s.leaves(s.leaving[0]) {
		s.leaving = s.leaving[1:]
	}
	slot = index.None
	fewest := spares
	for i, m := range s.leaving {
		if slot != index.None && fewest == 0 && s.settled == 0 {
			break
		}
		if !s.leaves(m) || m.pins > 0 || s.Index.At(m.Slot).Pins() != 0 || tenant != abi.None && s.TenantOf(m.Slot) != tenant {
			continue
		}
		if m.settled {
			if i == 0 {
				s.leaving = s.leaving[1:]
			}
			return m.Slot, true
		}
		if n := s.Hits.Of(m.Slot); n < fewest || slot == index.None && spares == 0 {
			slot, fewest = m.Slot, n
		}
	}
	return slot, false
}

func (s *Moves) leaves(m *Move) bool { return m.leaves && s.of[m.Slot] == m }

// check compares the moves with the entries.
func (s *Moves) check() error {
	var leaving int64
	leave, settled := 0, 0
	for slot, m := range s.of {
		if m.leaves {
			leaving += m.bytes
			leave++
		}
		if m.settled {
			settled++
		}
		if e := s.Index.At(slot); m.Slot != slot || m.gone.Load() || !e.Is(index.Live|index.Moving) || e.Is(index.Evicting) ||
			e.Pins() < m.pins {
			return fmt.Errorf("slot %d has %d pins and a move that is none: %+v", slot, e.Pins(), m.Mark)
		}
	}
	if leaving != s.bytes || leave != s.leavers || settled != s.settled {
		return fmt.Errorf("%d bytes of %d entries leave and %d are settled, the account says %d, %d and %d", leaving, leave, settled,
			s.bytes, s.leavers, s.settled)
	}
	return nil
}

// Granted records that a lookup is granted an entry, before the pin. first reports whether its request was not granted the
// entry before.
func (s *Moves) Granted(slot uint32, e *index.Entry, first bool) {
	if s.Hits.of != nil { // there are levels; otherwise nothing moves
		s.granted(slot, e, first)
	}
}

func (s *Moves) granted(slot uint32, e *index.Entry, first bool) {
	if e.Is(index.Moving) {
		s.stay(slot)
	}
	if first {
		s.Hits.add(slot, s.Index.High())
		if m := s.of[slot]; m != nil {
			m.hits.Store(s.Hits.Of(slot))
			m.changed()
		}
	}
}

// Hits counts, for the entry in each slot, the lookups that found it since it became resident, at most 254. Repeated lookups of a
// request count once. The counts are lost at a restart. It is guarded by the set's lock.
type Hits struct {
	of []uint8 // hits or taken, by slot; nil if hits are not counted
}

// taken marks an entry that came from an offer of another host and had no hit yet.
const taken = 255

func (h *Hits) Start() { h.of = []uint8{} }

// Of returns the hits of the entry in a slot.
func (h *Hits) Of(slot uint32) uint32 {
	if int(slot) < len(h.of) && h.of[slot] != taken {
		return uint32(h.of[slot])
	}
	return 0
}

// Taken reports whether the entry in a slot came from an offer of another host, and no lookup has granted it since. A restart
// loses this mark, so the entry may be offered once more afterwards.
func (h *Hits) Taken(slot uint32) bool { return int(slot) < len(h.of) && h.of[slot] == taken }

// Take marks the entry in a slot as coming from an offer of another host.
func (h *Hits) Take(slot, slots uint32) {
	h.grow(slot, slots)
	h.of[slot] = taken
}

// add counts a hit. slots is the number of slots.
func (h *Hits) add(slot, slots uint32) {
	if h.of == nil {
		return
	}
	h.grow(slot, slots)
	switch h.of[slot] {
	case taken:
		h.of[slot] = 1
	case taken - 1:
	default:
		h.of[slot]++
	}
}

func (h *Hits) grow(slot, slots uint32) {
	if int(slot) >= len(h.of) {
		h.of = append(h.of, make([]uint8, int(slots)-len(h.of))...)
	}
}

// forget resets the count of a slot for a new entry.
func (h *Hits) forget(slot uint32) {
	if int(slot) < len(h.of) {
		h.of[slot] = 0
	}
}

// Prefetched holds the entries that were copied here at the request of a lookup and not loaded since. It is guarded by the
// set's lock, except for the counters.
type Prefetched struct {
	of map[uint32]struct{} // by slot

	Used   atomic.Uint64 // copies that were loaded afterwards
	Wasted atomic.Uint64 // copies that were removed without a load
}

func (p *Prefetched) Add(slot uint32) {
	if p.of == nil {
		p.of = map[uint32]struct{}{}
	}
	p.of[slot] = struct{}{}
}

// loaded records that an entry is being loaded.
func (p *Prefetched) loaded(slot uint32) { p.end(slot, &p.Used) }

// goes records that an entry is being removed.
func (p *Prefetched) goes(slot uint32) { p.end(slot, &p.Wasted) }

func (p *Prefetched) end(slot uint32, n *atomic.Uint64) {
	if len(p.of) == 0 {
		return
	}
	if _, ok := p.of[slot]; ok {
		delete(p.of, slot)
		n.Add(1)
	}
}
