package policy

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// EvictOptions bind an eviction policy to one root.
type EvictOptions struct {
	MaxSlots uint32 // slot numbers are below this
	Capacity uint64 // bytes the root may hold
	Seed     uint64
	Config   Config
	// State of an earlier instance. A state that the policy cannot use is ignored: see [Evict.Loaded].
	State   State
	Observe Observer // optional
}

// Evict is the evict policy of one root. It is for one goroutine at a time, except for Stats.
type Evict struct {
	m        *Module
	usage    sandbox.Usage
	queue    []abi.Event // the first n, below len(queue), are events to deliver
	n        int
	batch    int // most events in one call
	maxSlots uint32
	seen     duplicates
	guest    guest.Evictor     // the guest, if it is native; otherwise nil
	in       *sandbox.Instance // the instance, if the guest is wasm; otherwise nil
	events   sandbox.Export
	step     sandbox.Export
	loaded   bool
	left     bool     // the last answer left the question to the host
	silences int      // number of calls of Unanswered since the last Answered
	err      error    // the reason for which the policy ended; nil while it runs
	observe  Observer // optional
}

// NewEvict starts an instance, from o.State if the instance can use it, otherwise with empty slots.
func (m *Module) NewEvict(ctx context.Context, o EvictOptions) (*Evict, error) {
	e, err := m.newEvict(ctx, o)
	if err != nil || !m.acceptsState(&o.State, o.MaxSlots) {
		return e, err
	}
	if e.in == nil {
		e.loaded = m.loadNative(e.guest, &o.State)
		return e, nil
	}
	ok, err := e.in.Load(o.State.Data, o.MaxSlots)
	if err == nil {
		e.loaded = ok
		return e, nil
	}
	m.logUnusable(err)
	e.in.Close()
	return m.newEvict(ctx, o) // the failed attempt leaves nothing, not even a fault in the count
}

func (m *Module) newEvict(ctx context.Context, o EvictOptions) (*Evict, error) {
	s := settings{role: abi.RoleEvict, config: o.Config}
	s.MaxSlots, s.Capacity, s.Seed = o.MaxSlots, o.Capacity, o.Seed
	if err := m.prepare(&s); err != nil {
		return nil, err
	}
	e := &Evict{m: m, maxSlots: o.MaxSlots, batch: sandbox.MaxBatch, queue: make([]abi.Event, eventQueue),
		usage: sandbox.Usage{Sampled: o.Observe == nil}, observe: o.Observe}
	var err error
	if m.code == nil {
		if e.guest, err = native[guest.Evictor](m, &s); err != nil {
			return nil, err
		}
		return e, nil
	}
	e.batch = m.code.Limits().Batch()
	if e.in, err = m.instantiate(ctx, &s, &e.usage); err != nil {
		return nil, err
	}
	if err := e.bind(); err != nil {
		e.in.Close()
		return nil, err
	}
	return e, nil
}

// bind requests the guest's buffers and looks up the role's exports.
func (e *Evict) bind() error {
	for kind, size := range map[int]uint32{
		abi.BufferEvents: sandbox.MaxBatch * abi.EventSize, abi.BufferArgs: abi.AskSize, abi.BufferResult: sandbox.MaxVictims * 4,
	} {
		if err := e.in.RequireBuffer(kind, size); err != nil {
			return err
		}
	}
	e.events, e.step = e.in.Export(abi.ExportEvents), e.in.Export(abi.ExportStep)
	return nil
}

// eventQueue is the most queued events: those of several calls, because a call right after another is 20 times cheaper
// than a late one (see the package comment).
const eventQueue = 4 * sandbox.MaxBatch

// Event queues an event. It is delivered with others: when the queue is full, by Victims, or by Flush.
//
// Event is just small enough to be inlined, which saves a copy of the event. The queue always has room for one.
func (e *Evict) Event(ev abi.Event) error {
	e.queue[e.n] = ev
	if e.n++; e.n == len(e.queue) {
		return e.Flush()
	}
	return nil
}

// Next returns the place of the next event, which Commit queues. The caller writes all its fields. It saves a copy for
// events by the thousand.
func (e *Evict) Next() *abi.Event { return &e.queue[e.n] }

// Commit queues the event that was written to Next.
func (e *Evict) Commit() error {
	if e.n++; e.n == len(e.queue) {
		return e.Flush()
	}
	return nil
}

func (e *Evict) Flush() error {
	if e.err != nil {
		e.n = len(e.queue) - 1 // so that the next event calls Flush again
		return e.err
	}
	if err := e.deliver(e.queue[:e.n]); err != nil {
		return e.drop(err)
	}
	e.n = 0
	return nil
}

// deliver passes events to the guest in one or more calls.
func (e *Evict) deliver(events []abi.Event) error {
	for len(events) > 0 {
		n := min(len(events), e.batch)
		if err := e.cross(events[:n]); err != nil {
			return err
		}
		events = events[n:]
	}
	return nil
}

func (e *Evict) observed(events []abi.Event) error {
	return e.observe.watch(&Call{Events: events, Allowed: e.fuel(len(events))}, e.Stats, func() error { return e.call(events) })
}

// fuel returns the fuel of a call with the given number of records. A native guest has no limit.
func (e *Evict) fuel(records int) uint64 {
	if e.in == nil {
		return 0
	}
	return e.m.code.Limits().For(records)
}

func (e *Evict) cross(events []abi.Event) error {
	if e.observe != nil {
		return e.observed(events)
	}
	return e.call(events)
}

func (e *Evict) call(events []abi.Event) error {
	if e.in == nil {
		start := e.usage.Begin(len(events))
		e.guest.Events(events)
		e.usage.End(start)
		return nil
	}
	n, err := e.write(events)
	if err != nil {
		return err
	}
	_, err = e.in.Status(&e.events, n, abi.EventSize, len(events), e.m.code.Limits().For(len(events)))
	return err
}

// write copies events into the guest's buffer.
func (e *Evict) write(events []abi.Event) (n uint64, err error) {
	if len(events) == 0 {
		return 0, nil
	}
	to, err := sandbox.Records[abi.Event](e.in, abi.BufferEvents, uint32(len(events)))
	copy(to, events)
	e.in.SetNow(events[len(events)-1].Time)
	return uint64(len(events)), err
}

// Victims delivers the queued events and asks for victims, in one call. It writes slots to dst, best victim first, and
// returns their number: enough to free ask.Bytes, or fewer. Slots are in range and distinct. The caller checks that
// they are resident and not pinned.
func (e *Evict) Victims(ask abi.Ask, dst []uint32) (n int, err error) {
	if e.err != nil {
		return 0, e.err
	}
	ask.MaxVictims = min(ask.MaxVictims, uint32(min(len(dst), sandbox.MaxVictims)))
	dst, e.left = dst[:ask.MaxVictims], false
	before := 0 // events that do not fit the call for victims
	if e.n > e.batch {
		before = (e.n - 1) / e.batch * e.batch
	}
	last := e.queue[before:e.n]
	if err = e.deliver(e.queue[:before]); err == nil {
		e.n = 0
		if e.observe != nil {
			n, err = e.observedVictims(ask, last, dst)
		} else {
			n, err = e.ask(ask, last, dst)
		}
	}
	if err != nil {
		return 0, e.drop(err)
	}
	return n, nil
}

// observedVictims is ask for an observer.
func (e *Evict) observedVictims(ask abi.Ask, last []abi.Event, dst []uint32) (n int, err error) {
	c := &Call{Events: last, Ask: &ask, Allowed: e.fuel(len(last) + sandbox.MaxVictims)}
	err = e.observe.watch(c, e.Stats, func() (err error) {
		n, err = e.ask(ask, last, dst)
		c.Victims = dst[:max(0, min(n, len(dst)))]
		return err
	})
	return n, err
}

// ask delivers the last events and returns the number of victims in dst.
func (e *Evict) ask(ask abi.Ask, last []abi.Event, dst []uint32) (int, error) {
	if e.in == nil {
		start := e.usage.Begin(len(last))
		if len(last) > 0 {
			e.guest.Events(last)
		}
		n := e.guest.Victims(ask, dst)
		e.usage.End(start)
		return n, e.judge(dst, n)
	}
	args, err := sandbox.Records[abi.Ask](e.in, abi.BufferArgs, 1)
	if err != nil {
		return 0, err
	}
	args[0] = ask
	events, err := e.write(last)
	if err != nil {
		return 0, err
	}
	// The cost of an answer depends on the entries that the policy passes over, not on the bytes asked for.
	n, ok, err := e.in.Count(&e.step, events, abi.EventSize, len(last),
		e.m.code.Limits().For(len(last)+sandbox.MaxVictims))
	if err != nil || !ok {
		e.left = true // the policy left the question: the host decides by last touch
		return 0, err
	}
	if n <= uint32(len(dst)) {
		victims, err := sandbox.Records[uint32](e.in, abi.BufferResult, n)
		if err != nil {
			return 0, err
		}
		copy(dst, victims)
	}
	return int(n), e.judge(dst, int(n))
}

// MaxSilences is the number of successive answers without an evictable entry, although there is one, that are
// tolerated. One more is a fault.
const MaxSilences = 64

// Unanswered counts an answer that names no evictable entry although there is one. After more than [MaxSilences] in a
// row it ends the policy, so that the next question returns a fault. An answer that leaves the question to the host does not count.
func (e *Evict) Unanswered() {
	if e.left {
		return
	}
	if e.silences++; e.silences > MaxSilences {
		_ = e.drop(e.bad("named no entry that can go in %d questions in a row, although there were some", e.silences))
	}
}

// Answered resets the count of [Evict.Unanswered], because an entry that the policy named was evicted.
func (e *Evict) Answered() { e.silences = 0 }

// VictimsAhead returns the manifest's number of victims that may be named before they are needed; 0 for a policy that
// must be asked each time.
func (e *Evict) VictimsAhead() int { return int(e.m.manifest.VictimsAhead) }

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
	if slot, twice := e.seen.find(dst[:n]); twice {
		return e.bad("named slot %d twice", slot)
	}
	return nil
}

// Ended reports whether the policy has failed or was closed. Every call then returns an error.
func (e *Evict) Ended() bool { return e.err != nil }

func (e *Evict) Close() error {
	if e.err == nil {
		e.drop(ErrClosed)
	}
	return nil
}

func (e *Evict) bad(format string, args ...any) error {
	reason := fmt.Sprintf(format, args...)
	if e.in != nil {
		return e.in.Fault(abi.ExportStep, reason, nil)
	}
	e.usage.Faults.Add(1)
	return &Fault{Module: e.m.name, Export: abi.ExportStep, Reason: reason}
}

// drop ends the instance. Every later call returns err.
func (e *Evict) drop(err error) error {
	if e.in != nil {
		e.in.Close()
	}
	e.err, e.guest = err, nil
	e.n = len(e.queue) - 1 // later events are discarded
	return err
}

// Stats may be called at any time.
func (e *Evict) Stats() Stats { return stats(&e.usage, e.m, abi.RoleEvict) }
