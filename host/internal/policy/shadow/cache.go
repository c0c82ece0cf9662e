package shadow

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// cache is the imaginary cache of a shadow.
type cache struct {
	evict    *policy.Evict
	set      *policy.Residents
	capacity int64
	max      int      // most entries
	touched  []uint32 // by slot: the request that touched the entry last
	victims  [256]uint32

	inPrefix         bool // no key of this lookup has missed yet
	keys, hits, live uint64
}

func newCache(e *policy.Evict, capacity int64, max uint32) *cache {
	return &cache{evict: e, set: policy.NewResidents(e), capacity: capacity, max: int(max)}
}

// step applies one step of the live cache. An error ends the policy.
func (c *cache) step(s *Step) error {
	switch s.Op {
	case End:
		return c.set.EndRequest(s.Tenant, s.Hints, s.cause())
	case Offer:
		if _, ok := c.set.Find(s.Key); ok {
			return nil
		}
		return c.insert(s)
	}
	c.keys++
	if s.Hit {
		c.live++
	}
	if s.First {
		c.inPrefix = true
	}
	slot, ok := c.set.Find(s.Key)
	switch {
	case ok && (c.inPrefix || !s.ByPrefix):
		c.hits++
		return c.touch(slot, s)
	case ok:
		return nil
	}
	c.inPrefix = false
	if s.Hit {
		return c.insert(s) // the engine would compute the chunk and offer it
	}
	return nil // the chunk is offered if the engine computes it
}

func (s *Step) cause() policy.Cause { return policy.Cause{Request: s.Request, Time: s.Time} }

func (c *cache) touch(slot uint32, s *Step) error {
	if s.Request != 0 && c.touched[slot] == s.Request {
		return nil
	}
	c.touched[slot] = s.Request
	return c.set.Touch(slot, s.cause())
}

func (c *cache) insert(s *Step) error {
	if ok, err := c.makeRoom(int64(s.Size)*abi.SizeUnit, s); err != nil || !ok {
		return err
	}
	e := policy.Resident{Key: s.Key, Parent: s.Parent, Size: s.Size, Depth: s.Depth, Tenant: s.Tenant}
	slot, err := c.set.Insert(abi.OpInsert, e, s.cause())
	for uint32(len(c.touched)) <= slot {
		c.touched = append(c.touched, 0)
	}
	c.touched[slot] = s.Request
	return err
}

// makeRoom evicts by the policy. It returns false if that does not free enough.
func (c *cache) makeRoom(need int64, s *Step) (bool, error) {
	enough := func() bool { return c.set.Used()+need <= c.capacity }
	for need <= c.capacity {
		if enough() && c.set.Len() < c.max {
			return true, nil
		}
		short := c.set.Used() + need - c.capacity
		ask := abi.Ask{Bytes: uint64(max(short, 1)), MaxVictims: uint32(len(c.victims)), Tenant: abi.None}
		removed, err := c.set.Evict(c.evict, ask, c.victims[:], s.cause(), enough)
		if err != nil {
			return false, err
		}
		if removed == 0 {
			break
		}
	}
	return false, nil
}
