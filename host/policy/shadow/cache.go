package shadow

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
)

// cache is the imaginary one: what would be there, and in which slot.
type cache struct {
	evict    *policy.Evict
	capacity int64
	max      uint32

	used    int64
	slotOf  map[uint64]uint32 // by key
	firstOf map[uint64]uint32 // by parent: a child, the first of a chain
	slots   []slot
	free    []uint32
	victims [256]uint32

	running                            bool // no key of this lookup has missed yet
	keys, hits, live, evictions, sheds uint64
}

// slot is one entry.
type slot struct {
	key, parent  uint64
	next, before uint32 // among the children of the parent
	size, depth  uint32
	tenant       uint32
	request      uint32 // that touched it last
}

func newCache(e *policy.Evict, capacity int64, max uint32) *cache {
	return &cache{evict: e, capacity: capacity, max: max, slotOf: map[uint64]uint32{}, firstOf: map[uint64]uint32{}}
}

// step is what the policy and the cache make of one thing that happened. An error is the policy's end.
func (c *cache) step(s *Step) error {
	switch s.Op {
	case End:
		return c.evict.Event(abi.Event{
			Op: abi.OpRequestEnd, Slot: abi.None, Parent: abi.None, Request: s.Request, Tenant: s.Tenant, Time: s.Time,
		})
	case Offer:
		if _, there := c.slotOf[s.Key]; there {
			return nil
		}
		return c.insert(s)
	}
	c.keys++
	if s.Hit {
		c.live++
	}
	if s.First {
		c.running = true
	}
	slot, there := c.slotOf[s.Key]
	switch {
	case there && (c.running || !s.ByPrefix):
		c.hits++
		return c.touch(slot, s)
	case there:
		return nil
	}
	c.running = false
	if s.Hit {
		return c.insert(s) // the engine would compute it, and offer it
	}
	return nil // it will be offered if it is computed
}

func (c *cache) touch(at uint32, s *Step) error {
	e := &c.slots[at]
	if s.Request != 0 && e.request == s.Request {
		return nil
	}
	e.request = s.Request
	return c.tell(abi.OpTouch, at, abi.None, s)
}

func (c *cache) tell(op abi.Op, at, parent uint32, s *Step) error {
	e := &c.slots[at]
	return c.evict.Event(abi.Event{
		Op: op, Slot: at, Parent: parent, Key: e.key, ParentKey: e.parent, Size: e.size, Depth: e.depth, Tenant: e.tenant,
		Request: s.Request, Time: s.Time,
	})
}

func (c *cache) insert(s *Step) error {
	need := int64(s.Size) * abi.SizeUnit
	if ok, err := c.makeRoom(need, s); err != nil || !ok {
		return err
	}
	at := uint32(len(c.slots))
	if n := len(c.free); n > 0 {
		at, c.free = c.free[n-1], c.free[:n-1]
	} else {
		c.slots = append(c.slots, slot{})
	}
	e := &c.slots[at]
	*e = slot{key: s.Key, parent: s.Parent, size: s.Size, depth: s.Depth, tenant: s.Tenant, request: s.Request, next: abi.None, before: abi.None}
	c.slotOf[s.Key] = at
	c.used += need
	parent := abi.None
	if s.Parent != 0 {
		if p, ok := c.slotOf[s.Parent]; ok {
			parent = p
		}
		if first, ok := c.firstOf[s.Parent]; ok {
			e.next, c.slots[first].before = first, at
		}
		c.firstOf[s.Parent] = at
	}
	if err := c.tell(abi.OpInsert, at, parent, s); err != nil {
		return err
	}
	child, ok := c.firstOf[s.Key]
	for ok && child != abi.None {
		if err := c.tell(abi.OpLink, child, at, s); err != nil {
			return err
		}
		child = c.slots[child].next
	}
	return nil
}

// makeRoom evicts as the policy says. It is false when that does not make enough room.
func (c *cache) makeRoom(need int64, s *Step) (bool, error) {
	for need <= c.capacity {
		short, full := c.used+need-c.capacity, uint32(len(c.slotOf)) >= c.max
		if short <= 0 && !full {
			return true, nil
		}
		ask := abi.Ask{Bytes: uint64(max(short, 1)), MaxVictims: uint32(len(c.victims)), Tenant: abi.None}
		n, err := c.evict.Victims(ask, c.victims[:])
		if err != nil {
			return false, err
		}
		gone := 0
		for _, at := range c.victims[:n] {
			if !c.holds(at) {
				continue
			}
			if c.used+need <= c.capacity && gone > 0 {
				break
			}
			if err := c.remove(at, s); err != nil {
				return false, err
			}
			gone++
		}
		if gone == 0 {
			break
		}
	}
	c.sheds++
	return false, nil
}

func (c *cache) holds(at uint32) bool {
	if uint64(at) >= uint64(len(c.slots)) {
		return false
	}
	of, ok := c.slotOf[c.slots[at].key]
	return ok && of == at
}

func (c *cache) remove(at uint32, s *Step) error {
	e := &c.slots[at]
	if e.parent != 0 {
		switch {
		case e.before != abi.None:
			c.slots[e.before].next = e.next
		case e.next != abi.None:
			c.firstOf[e.parent] = e.next
		default:
			delete(c.firstOf, e.parent)
		}
		if e.next != abi.None {
			c.slots[e.next].before = e.before
		}
	}
	delete(c.slotOf, e.key)
	c.used -= int64(e.size) * abi.SizeUnit
	c.free = append(c.free, at)
	c.evictions++
	return c.tell(abi.OpRemove, at, abi.None, s)
}
