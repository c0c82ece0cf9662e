package sim

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// cache is the host's side of one root: the resident chunks and their slots.
type cache struct {
	w         *Workload
	e         *policy.Evict
	slotOf    []uint32 // by chunk; abi.None when it is not resident
	chunkOf   []uint32 // by slot
	children  []uint32 // by chunk: how many of its children are resident
	free      []uint32
	units     uint32
	victims   []uint32
	hits      int
	evictions int
	shed      int
}

func newCache(w *Workload, e *policy.Evict, capacity int, units uint32) *cache {
	c := &cache{
		w: w, e: e, units: units,
		slotOf: make([]uint32, len(w.keys)), children: make([]uint32, len(w.keys)), chunkOf: make([]uint32, capacity),
		free: make([]uint32, capacity), victims: make([]uint32, 1),
	}
	for i := range c.slotOf {
		c.slotOf[i] = abi.None
	}
	for i := range c.free {
		c.chunkOf[i] = abi.None
		c.free[i] = uint32(capacity - 1 - i)
	}
	return c
}

// request looks up one request's chunks, stores those that are missing, and ends the request. It returns the length of the
// resident prefix.
func (c *cache) request(ids []uint32, number uint32) (prefix int, err error) {
	now := c.w.times[number-1]
	if prefix, err = c.forward(ids, number, now); err != nil {
		return 0, err
	}
	return prefix, c.e.Event(abi.NewRequestEnd(number, 0, c.w.hints[number-1], now))
}

// forward is the simulator's hot path.
func (c *cache) forward(ids []uint32, number uint32, now uint64) (prefix int, err error) {
	e, slotOf, keys, units := c.e, c.slotOf, c.w.keys[:len(c.slotOf)], c.units
	parent, parentKey := abi.None, uint64(0)
	misses := 0
	for depth, id := range ids {
		if uint64(id) >= uint64(len(slotOf)) {
			break // it cannot be, and the compiler need not check again
		}
		slot, key := slotOf[id], keys[id]
		if slot == abi.None {
			if misses == 0 {
				prefix = depth
			}
			misses++
			if parent, err = c.store(id, number, now); err != nil {
				return 0, err
			}
			parentKey = key
			continue
		}
		err = e.Event(abi.Event{
			Slot: slot, Parent: parent, Key: key, ParentKey: parentKey, Size: units, Depth: uint32(depth),
			Request: number, Op: abi.OpTouch, Time: now,
		})
		if err != nil {
			return 0, err
		}
		parent, parentKey = slot, key
	}
	if misses == 0 {
		prefix = len(ids)
	}
	c.hits += len(ids) - misses
	return prefix, nil
}

// store makes room for a chunk, and returns its slot, or None.
func (c *cache) store(id, number uint32, now uint64) (uint32, error) {
	slot, err := c.insert(id, number, now)
	if err != nil || slot == abi.None {
		return slot, err
	}
	ev := abi.Event{
		Op: abi.OpInsert, Slot: slot, Parent: abi.None, Key: c.w.keys[id], Size: c.units, Depth: c.w.depths[id],
		Request: number, Time: now,
	}
	if parent := c.w.parents[id]; parent != abi.None {
		ev.Parent, ev.ParentKey = c.slotOf[parent], c.w.keys[parent]
	}
	if err := c.e.Event(ev); err != nil {
		return 0, err
	}
	if c.children[id] > 0 {
		return slot, c.link(id, slot, number, now)
	}
	return slot, nil
}

// insert finds a slot for a chunk, or None when the policy frees none.
func (c *cache) insert(id, number uint32, now uint64) (uint32, error) {
	if len(c.free) == 0 {
		ask := abi.Ask{Bytes: uint64(c.units) * abi.SizeUnit, MaxVictims: uint32(len(c.victims)), Tenant: abi.None}
		n, err := c.e.Victims(ask, c.victims)
		if err != nil {
			return 0, err
		}
		for _, slot := range c.victims[:n] {
			if err := c.remove(slot, number, now); err != nil {
				return 0, err
			}
		}
		if len(c.free) == 0 {
			c.shed++
			return abi.None, nil
		}
	}
	slot := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	c.slotOf[id], c.chunkOf[slot] = slot, id
	if parent := c.w.parents[id]; parent != abi.None {
		c.children[parent]++
	}
	return slot, nil
}

// link sends LINK for the resident children of a chunk that came back.
func (c *cache) link(parent, parentSlot, number uint32, now uint64) error {
	for id := c.w.firstChild[parent]; id != abi.None; id = c.w.sibling[id] {
		if c.slotOf[id] == abi.None {
			continue
		}
		err := c.e.Event(abi.Event{
			Op: abi.OpLink, Slot: c.slotOf[id], Parent: parentSlot, Key: c.w.keys[id], ParentKey: c.w.keys[parent],
			Size: c.units, Depth: c.w.depths[id], Request: number, Time: now,
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// remove evicts the chunk in a slot, if there is one.
func (c *cache) remove(slot, number uint32, now uint64) error {
	id := c.chunkOf[slot]
	if id == abi.None {
		return nil
	}
	c.slotOf[id], c.chunkOf[slot] = abi.None, abi.None
	c.free = append(c.free, slot)
	c.evictions++
	var parentKey uint64
	if parent := c.w.parents[id]; parent != abi.None {
		c.children[parent]--
		parentKey = c.w.keys[parent]
	}
	return c.e.Event(abi.Event{
		Op: abi.OpRemove, Slot: slot, Parent: abi.None, Key: c.w.keys[id], ParentKey: parentKey, Size: c.units,
		Depth: c.w.depths[id], Request: number, Time: now,
	})
}
