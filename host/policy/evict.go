package policy

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// EvictOptions bind an eviction policy to one root.
type EvictOptions struct {
	MaxSlots uint32 // slots are below this
	Capacity uint64 // bytes the root may hold
	Seed     uint64
	Config   Config
	// State of an earlier instance, to go on from. What the policy cannot use does no harm: see [Evict.Loaded].
	State State
}

// Evict is the eviction policy of one root. It is not safe for concurrent use, Stats excepted: the caller serialises.
type Evict struct {
	m        *Module
	meter    meter
	buf      []abi.Event // where events wait for the crossing: of them n < len(buf) are taken
	batch    uint32      // most events in one crossing
	n        int
	maxSlots uint32
	seen     distinct
	guest    guest.Evictor // native
	in       *instance     // wasm; buf is then the guest's own EVENTS buffer
	events   export
	step     export
	loaded   bool
	err      error // why the policy ended
}

// NewEvict makes an instance: with what o.State holds if it can use that, and otherwise with an empty slot space.
func (m *Module) NewEvict(ctx context.Context, o EvictOptions) (*Evict, error) {
	e, err := m.newEvict(ctx, o)
	if err != nil || !m.takes(&o.State, o.MaxSlots) {
		return e, err
	}
	if e.in == nil {
		e.loaded = m.loadNative(e.guest, &o.State)
		return e, nil
	}
	ok, err := e.in.load(o.State.Data, o.MaxSlots)
	if err == nil {
		err = e.rebind()
	}
	if err == nil {
		e.loaded = ok
		return e, nil
	}
	m.unread(err)
	e.in.close()
	return m.newEvict(ctx, o) // nothing of the failed attempt is left, its count of faults included
}

func (m *Module) newEvict(ctx context.Context, o EvictOptions) (*Evict, error) {
	s := settings{role: abi.RoleEvict, maxSlots: o.MaxSlots, capacity: o.Capacity, seed: o.Seed, config: o.Config}
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	e := &Evict{m: m, maxSlots: o.MaxSlots, batch: batchSize, meter: meter{busy: true}}
	var err error
	if m.code == nil {
		if e.guest, err = native[guest.Evictor](m, &s); err != nil {
			return nil, err
		}
		e.buf = make([]abi.Event, batchSize)
		return e, nil
	}
	e.batch = m.code.fuel.records()
	if e.in, err = m.instantiate(ctx, &s, &e.meter); err != nil {
		return nil, err
	}
	if err := e.bind(); err != nil {
		e.in.close()
		return nil, err
	}
	return e, nil
}

// bind asks the guest for its buffers and looks up the role's exports.
func (e *Evict) bind() error {
	for kind, size := range map[int]uint32{
		abi.BufferEvents: batchSize * abi.EventSize, abi.BufferArgs: abi.AskSize, abi.BufferResult: maxVictims * 4,
	} {
		if err := e.in.buffer(kind, size); err != nil {
			return err
		}
	}
	e.events, e.step = e.in.export(abi.ExportEvents), e.in.export(abi.ExportStep)
	return e.rebind()
}

// rebind finds the guest's EVENTS buffer again: its memory may have moved in a call.
func (e *Evict) rebind() (err error) {
	e.n = 0
	e.buf, err = records[abi.Event](e.in, abi.BufferEvents, e.batch)
	return err
}

// Event takes an event. It is delivered together with others: when the batch is full, with Victims, or with Flush.
//
// It is just small enough to be inlined, which saves copying the event once more: buf always has room for one.
func (e *Evict) Event(ev abi.Event) error {
	e.buf[e.n] = ev
	if e.n++; e.n == len(e.buf) {
		return e.Flush()
	}
	return nil
}

// Next is where to write the next event, all of it; Took takes it. That saves a copy where events come by the thousand.
func (e *Evict) Next() *abi.Event { return &e.buf[e.n] }

// Took is Event for what was written to Next.
func (e *Evict) Took() error {
	if e.n++; e.n == len(e.buf) {
		return e.Flush()
	}
	return nil
}

// Flush delivers the events that wait.
func (e *Evict) Flush() error {
	if e.err != nil {
		e.n = len(e.buf) - 1 // the next event comes here again
		return e.err
	}
	if e.n == 0 {
		return nil
	}
	if e.in == nil {
		start := e.meter.begin(e.n)
		e.guest.Events(e.buf[:e.n])
		e.meter.done(start)
		e.n = 0
		return nil
	}
	e.in.now = e.buf[e.n-1].Time
	if _, err := e.in.status(&e.events, uint64(e.n), abi.EventSize, e.n, e.m.code.fuel.of(e.n)); err != nil {
		return e.drop(err)
	}
	if err := e.rebind(); err != nil {
		return e.drop(err)
	}
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
	dst = dst[:ask.MaxVictims]
	n, err := e.ask(ask, dst)
	if err == nil {
		err = e.judge(dst, n)
	}
	if err != nil {
		return 0, e.drop(err)
	}
	return n, nil
}

func (e *Evict) ask(ask abi.Ask, dst []uint32) (int, error) {
	if e.in == nil {
		start := e.meter.begin(e.n)
		if e.n > 0 {
			e.guest.Events(e.buf[:e.n])
		}
		n := e.guest.Victims(ask, dst)
		e.meter.done(start)
		e.n = 0
		return n, nil
	}
	args, err := records[abi.Ask](e.in, abi.BufferArgs, 1)
	if err != nil {
		return 0, err
	}
	args[0] = ask
	if e.n > 0 {
		e.in.now = e.buf[e.n-1].Time
	}
	// What an answer takes follows from what it must pass over, not from how much is asked for.
	n, ok, err := e.in.count(&e.step, uint64(e.n), abi.EventSize, e.n, e.m.code.fuel.of(e.n+maxVictims))
	if err != nil {
		return 0, err
	}
	if err := e.rebind(); err != nil || !ok {
		return 0, err // the host's default is to free nothing: the store is shed
	}
	if n > uint32(len(dst)) {
		return int(n), nil
	}
	victims, err := records[uint32](e.in, abi.BufferResult, n)
	copy(dst, victims)
	return int(n), err
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

func (e *Evict) bad(format string, args ...any) error {
	reason := fmt.Sprintf(format, args...)
	if e.in != nil {
		return e.in.fault(abi.ExportStep, reason, nil)
	}
	e.meter.faults.Add(1)
	return &Fault{Module: e.m.name, Export: abi.ExportStep, Reason: reason}
}

// drop ends the instance for a reason, which every later call returns.
func (e *Evict) drop(err error) error {
	if e.in != nil {
		e.in.close()
	}
	e.err, e.guest = err, nil
	e.buf, e.n = make([]abi.Event, batchSize), batchSize-1 // nobody's
	return err
}

// Stats may be called at any time.
func (e *Evict) Stats() Stats { return e.meter.stats(e.m, abi.RoleEvict) }
