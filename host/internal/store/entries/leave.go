package entries

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// An entry can be copied to another level while it is served. One that is to leave its root is named by the evict
// policy ahead of need: the policy forgets it, and it waits, still served, until its bytes are needed or a lookup finds
// it again, in which case it stays and the policy gets it anew. So a put that needs room waits for no copy:
// what has its copy goes first, and then what was hit least.

// Move is an entry that is copied, or waits for that.
type Move struct {
	Mark
	// Changed is called when the move is worth more than before, or not wanted any more, with the lock of the set; may be nil.
	Changed func()

	gone    atomic.Bool
	ended   atomic.Bool   // whoever asked for it does not want it any more
	leaving atomic.Bool   // leaves, without the lock
	hits    atomic.Uint32 // of the entry
	leaves  bool          // it is to go, and the policy does not know it any more
	through bool          // it is copied whether it leaves or not
	settled bool          // of one that leaves: nothing more is done with it before it goes
	pins    uint8         // that its copy has, while it is being made
	bytes   int64
}

// Gone says that the entry is not there any more: no copy is wanted. It needs no lock.
func (m *Move) Gone() bool { return m.gone.Load() }

// Cancel says that whoever asked for the copy does not want it any more. It needs no lock.
func (m *Move) Cancel() { m.ended.Store(true) }

// Cancelled says that the copy is not wanted. It needs no lock.
func (m *Move) Cancelled() bool { return m.ended.Load() || m.Gone() }

// Worth is the hits of the entry, and whether it is about to go. It needs no lock.
func (m *Move) Worth() (hits uint32, leaves bool) { return m.hits.Load(), m.leaving.Load() }

func (m *Move) changed() {
	if m.Changed != nil {
		m.Changed()
	}
}

// Moves are those of a set's entries. The set's lock guards them.
type Moves struct {
	*Set
	of      map[uint32]*Move // by slot
	leaving []*Move          // in the policy's order; those that stay after all are still in it
	bytes   int64            // of those that leave
	leavers int              // how many leave
	settled int              // how many of them
}

// Leave makes an entry one that leaves, which the policy has named. It returns a move that is to be made. There is none where
// the entry waits for its copy already, or cannot leave now, as while it is copied nearer.
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

// Through makes an entry one that is copied to the next level whether it leaves or not, as Copy does.
func (s *Moves) Through(slot uint32) *Move {
	m := s.Copy(slot)
	if m != nil {
		m.through = true
	}
	return m
}

// Copy makes an entry one that is copied and stays. It returns nil when it is being copied already, or is not whole.
func (s *Moves) Copy(slot uint32) *Move {
	e := s.Index.At(slot)
	if e.Any(index.Moving|index.Evicting) || !e.Is(index.Complete) {
		return nil
	}
	return s.begin(slot)
}

// Take is Copy for one that copies at once: a copy that only waits is not wanted any more.
func (s *Moves) Take(slot uint32) *Move {
	s.Forgo(slot)
	return s.Copy(slot)
}

// Forgo cancels a copy nearer that has not begun.
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

// BeginCopy pins a move's entry for its copy. It says false when the entry has gone, was asked for again before its
// copy began, or is not whole.
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

// EndCopy ends a move, after BeginCopy or without. An entry that leaves can go now.
func (s *Moves) EndCopy(m *Move) {
	if m.leaves && !m.gone.Load() {
		m.settled = true
		s.settled++
	} else {
		s.forget(m)
	}
	s.PauseCopy(m)
}

// PauseCopy takes BeginCopy back: the move goes on.
func (s *Moves) PauseCopy(m *Move) {
	was := m.pins
	m.pins = 0
	switch {
	case was == 0:
	case m.leaves && !s.Index.At(m.Slot).Is(index.Evicting):
		s.Index.Unpin(m.Slot) // the policy knows of no pin
	default:
		s.Unpin(m.Mark)
	}
}

// stay keeps an entry that is being copied, or left, because it is wanted.
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

// forget lets go of a move's entry, unless another move has it.
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

// stop takes a move that leaves out of the account.
func (s *Moves) stop(m *Move) {
	s.bytes -= m.bytes
	s.leavers--
	if m.settled {
		s.settled--
	}
}

// KeepAll keeps what was to leave.
func (s *Moves) KeepAll() {
	for _, m := range s.leaving {
		if s.of[m.Slot] == m {
			s.stay(m.Slot)
		}
	}
	s.leaving = nil
}

// Leaving is the bytes of entries that leave.
func (s *Moves) Leaving() int64 { return s.bytes }

// LeavingOf is the bytes of a tenant's entries that leave.
func (s *Moves) LeavingOf(tenant uint32) (bytes int64) {
	for _, m := range s.leaving {
		if s.leaves(m) && s.TenantOf(m.Slot) == tenant {
			bytes += m.bytes
		}
	}
	return bytes
}

// NextLeaving is the entry that goes first among those that leave, or None; only of the tenant, if one is named. First is what
// is settled, then what has fewest hits, but nothing with so many hits as spares says, unless that is 0, and nothing that is being
// read.
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

// Granted follows the grant of an entry to a lookup, before its pin; first says that its request has not asked before.
func (s *Moves) Granted(slot uint32, e *index.Entry, first bool) {
	if s.Hits.of != nil { // there are levels: nothing moves without them
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

// Hits counts, by slot, how many lookups have granted an entry since it became resident, 254 at most. A request that
// asks again counts once. The counts are not kept over a restart. The set's lock guards them.
type Hits struct {
	of []uint8 // nil: nothing is counted; else the count, or taken
}

// taken is what another host had offered, before its first hit.
const taken = 255

func (h *Hits) Start() { h.of = []uint8{} }

// Of is the hits of the entry in a slot.
func (h *Hits) Of(slot uint32) uint32 {
	if int(slot) < len(h.of) && h.of[slot] != taken {
		return uint32(h.of[slot])
	}
	return 0
}

// Taken says whether another host had offered the entry in a slot, and no lookup has granted it since. This is not kept over a restart
// either: then it may be offered once more.
func (h *Hits) Taken(slot uint32) bool { return int(slot) < len(h.of) && h.of[slot] == taken }

// Take says that another host had offered the entry in a slot.
func (h *Hits) Take(slot, slots uint32) {
	h.grow(slot, slots)
	h.of[slot] = taken
}

// add counts a hit. There are so many slots.
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

// forget ends the count of the entry that was in a slot before.
func (h *Hits) forget(slot uint32) {
	if int(slot) < len(h.of) {
		h.of[slot] = 0
	}
}

// Prefetched are the entries that were copied here because a lookup asked for that, and were not loaded since. The set's
// lock guards them, but not the counts.
type Prefetched struct {
	of map[uint32]struct{} // by slot

	Used   atomic.Uint64 // copies that were loaded afterwards
	Wasted atomic.Uint64 // copies that went without
}

func (p *Prefetched) Add(slot uint32) {
	if p.of == nil {
		p.of = map[uint32]struct{}{}
	}
	p.of[slot] = struct{}{}
}

// loaded says that an entry is loaded.
func (p *Prefetched) loaded(slot uint32) { p.end(slot, &p.Used) }

// goes says that an entry is removed.
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
