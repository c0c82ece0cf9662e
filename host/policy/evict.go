package policy

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// EvictOptions bind an eviction policy to one root.
type EvictOptions struct {
	MaxSlots uint32 // slots are below this
	Capacity uint64 // bytes the root may hold
	Seed     uint64
	Config   Config
}

// Evict is the eviction policy of one root. It is not safe for concurrent use, Stats excepted: the caller serialises.
type Evict struct {
	m        *Module
	meter    meter
	buf      []abi.Event // where events wait for the crossing; empty once the policy is closed or faulted
	n        int
	maxSlots uint32
	seen     distinct
	guest    guest.Evictor // native
	err      error         // why buf is empty
}

// NewEvict makes an instance with an empty slot space.
func (m *Module) NewEvict(ctx context.Context, o EvictOptions) (*Evict, error) {
	s := settings{role: abi.RoleEvict, maxSlots: o.MaxSlots, capacity: o.Capacity, seed: o.Seed, config: o.Config}
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	e := &Evict{m: m, maxSlots: o.MaxSlots}
	g, err := native[guest.Evictor](m, &s)
	if err != nil {
		return nil, err
	}
	e.guest, e.buf = g, make([]abi.Event, batchSize)
	return e, nil
}

// Event takes an event. It is delivered together with others: when the batch is full, with Victims, or with Flush.
func (e *Evict) Event(ev abi.Event) error {
	if e.n < len(e.buf) {
		e.buf[e.n] = ev
		e.n++
		return nil
	}
	return e.full(ev)
}

func (e *Evict) full(ev abi.Event) error {
	if err := e.Flush(); err != nil {
		return err
	}
	e.buf[0] = ev
	e.n = 1
	return nil
}

// Flush delivers the events that wait.
func (e *Evict) Flush() error {
	if e.err != nil {
		return e.err
	}
	if e.n == 0 {
		return nil
	}
	start := time.Now()
	e.guest.Events(e.buf[:e.n])
	e.meter.add(start, e.n)
	e.n = 0
	return nil
}

// Victims delivers the events that wait and asks what is to go, in one crossing. It writes slots to dst, best victim
// first, and returns how many: as many as would free ask.Bytes, or fewer. Slots are in range and distinct; whether they
// are resident and not pinned is for the caller to judge.
func (e *Evict) Victims(ask abi.Ask, dst []uint32) (int, error) {
	if e.err != nil {
		return 0, e.err
	}
	ask.MaxVictims = min(ask.MaxVictims, uint32(min(len(dst), maxVictims)))
	start := time.Now()
	if e.n > 0 {
		e.guest.Events(e.buf[:e.n])
	}
	n := e.guest.Victims(ask, dst[:ask.MaxVictims])
	e.meter.add(start, e.n)
	e.n = 0
	if err := e.judge(dst[:ask.MaxVictims], n); err != nil {
		return 0, e.drop(err)
	}
	return n, nil
}

// judge checks an answer of n victims.
func (e *Evict) judge(dst []uint32, n int) error {
	if n < 0 || n > len(dst) {
		return e.bad("answered %d victims when asked for at most %d", n, len(dst))
	}
	for _, slot := range dst[:n] {
		if slot >= e.maxSlots {
			return e.bad("named slot %d, slots are below %d", slot, e.maxSlots)
		}
	}
	if slot, twice := e.seen.twice(dst[:n]); twice {
		return e.bad("named slot %d twice", slot)
	}
	return nil
}

// Close ends the policy.
func (e *Evict) Close() error {
	if e.err == nil {
		e.drop(ErrClosed)
	}
	return nil
}

// drop ends the instance for a reason, which every later call returns.
func (e *Evict) drop(err error) error {
	e.err, e.buf, e.n, e.guest = err, nil, 0, nil
	return err
}

// Stats may be called at any time.
func (e *Evict) Stats() Stats { return e.meter.stats(e.m, abi.RoleEvict) }
