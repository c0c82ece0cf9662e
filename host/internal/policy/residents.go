package policy

import "github.com/kvhost/kvhost/abi"

// eventSink receives events; [Evict] is one.
type eventSink interface {
	Event(abi.Event) error
}

type victimSource interface {
	eventSink
	Victims(ask abi.Ask, dst []uint32) (int, error)
}

type Resident struct {
	Key    uint64 // fingerprint
	Parent uint64 // fingerprint; 0 for the first chunk of a prefix
	Size   uint32 // in abi.SizeUnit
	Depth  uint32
	Tenant uint32
}

// Cause is the time and the request of an event; 0: no request.
type Cause struct {
	Request uint32
	Time    uint64
}

// Residents is the host's side of an evict policy: the resident entries of one root with their slots, and the events
// about them. The self-test of modules and shadows use it. The store and the simulator have tables of their own,
// because they handle more entries and events. Its methods first change the set and then send the event; an error is
// the policy's.
type Residents struct {
	policy     eventSink
	slots      []slot
	free       []uint32
	slotOf     map[uint64]uint32 // by key
	firstChild map[uint64]uint32 // the first of the list of children, by parent
	used       int64
}

type slot struct {
	Resident
	next, prev uint32 // slots of the neighbours in the parent's list of children
	pins       uint32
	resident   bool
}

func NewResidents(p eventSink) *Residents {
	return &Residents{policy: p, slotOf: map[uint64]uint32{}, firstChild: map[uint64]uint32{}}
}

// Len is the number of entries.
func (s *Residents) Len() int { return len(s.slotOf) }

// Used is the bytes of all entries.
func (s *Residents) Used() int64 { return s.used }

// Find returns the slot of a key.
func (s *Residents) Find(key uint64) (slot uint32, ok bool) {
	slot, ok = s.slotOf[key]
	return slot, ok
}

// At returns the entry in a slot. ok is false when the slot is empty or out of range.
func (s *Residents) At(slot uint32) (e Resident, ok bool) {
	if uint64(slot) >= uint64(len(s.slots)) || !s.slots[slot].resident {
		return Resident{}, false
	}
	return s.slots[slot].Resident, true
}

// Evictable reports whether a slot has an entry that is not pinned.
func (s *Residents) Evictable(slot uint32) bool {
	return uint64(slot) < uint64(len(s.slots)) && s.slots[slot].resident && s.slots[slot].pins == 0
}

// Insert adds an entry with a key that is not resident, and links its resident children. op is INSERT or RESIDENT.
func (s *Residents) Insert(op abi.Op, e Resident, c Cause) (at uint32, err error) {
	at = uint32(len(s.slots))
	if n := len(s.free); n > 0 {
		at, s.free = s.free[n-1], s.free[:n-1]
	} else {
		s.slots = append(s.slots, slot{})
	}
	s.slots[at] = slot{Resident: e, next: abi.None, prev: abi.None, resident: true}
	s.slotOf[e.Key] = at
	s.used += int64(e.Size) * abi.SizeUnit
	parent := abi.None
	if e.Parent != 0 {
		if p, ok := s.slotOf[e.Parent]; ok {
			parent = p
		}
		if first, ok := s.firstChild[e.Parent]; ok {
			s.slots[at].next, s.slots[first].prev = first, at
		}
		s.firstChild[e.Parent] = at
	}
	if err := s.send(op, at, parent, c); err != nil {
		return at, err
	}
	child, ok := s.firstChild[e.Key]
	for ok && child != abi.None {
		if err := s.send(abi.OpLink, child, at, c); err != nil {
			return at, err
		}
		child = s.slots[child].next
	}
	return at, nil
}

// Touch records that a request was granted the entry in a slot.
func (s *Residents) Touch(slot uint32, c Cause) error { return s.send(abi.OpTouch, slot, abi.None, c) }

// Pin keeps the entry in a slot from being a victim until an equal number of calls of Unpin.
func (s *Residents) Pin(slot uint32, c Cause) error {
	if s.slots[slot].pins++; s.slots[slot].pins > 1 {
		return nil
	}
	return s.send(abi.OpPin, slot, abi.None, c)
}

func (s *Residents) Unpin(slot uint32, c Cause) error {
	if s.slots[slot].pins--; s.slots[slot].pins > 0 {
		return nil
	}
	return s.send(abi.OpUnpin, slot, abi.None, c)
}

// Pinned reports whether the entry in a slot is pinned.
func (s *Residents) Pinned(slot uint32) bool { return s.slots[slot].pins > 0 }

// Remove takes the entry out of a slot.
func (s *Residents) Remove(at uint32, c Cause) error {
	e := &s.slots[at]
	if e.Parent != 0 {
		switch {
		case e.prev != abi.None:
			s.slots[e.prev].next = e.next
		case e.next != abi.None:
			s.firstChild[e.Parent] = e.next
		default:
			delete(s.firstChild, e.Parent)
		}
		if e.next != abi.None {
			s.slots[e.next].prev = e.prev
		}
	}
	delete(s.slotOf, e.Key)
	e.resident = false
	s.used -= int64(e.Size) * abi.SizeUnit
	s.free = append(s.free, at)
	return s.send(abi.OpRemove, at, abi.None, c)
}

// EndRequest records the end of a request, with the hints of its engine.
func (s *Residents) EndRequest(tenant uint32, h abi.Hints, c Cause) error {
	return s.policy.Event(abi.NewRequestEnd(c.Request, tenant, h, c.Time))
}

// Evict asks for victims and removes the evictable ones until enough is true. It returns the number of removed entries.
func (s *Residents) Evict(p victimSource, ask abi.Ask, dst []uint32, c Cause, enough func() bool) (removed int, err error) {
	n, err := p.Victims(ask, dst)
	if err != nil {
		return 0, err
	}
	for _, slot := range dst[:n] {
		if !s.Evictable(slot) {
			continue // it has changed since the question, which is no fault
		}
		if removed > 0 && enough() {
			break
		}
		if err := s.Remove(slot, c); err != nil {
			return removed, err
		}
		removed++
	}
	return removed, nil
}

// send sends the policy an event about the entry in a slot.
func (s *Residents) send(op abi.Op, at, parent uint32, c Cause) error {
	e := &s.slots[at].Resident
	return s.policy.Event(abi.Event{
		Op: op, Slot: at, Parent: parent, Key: e.Key, ParentKey: e.Parent, Size: e.Size, Depth: e.Depth, Tenant: e.Tenant,
		Request: c.Request, Time: c.Time,
	})
}
