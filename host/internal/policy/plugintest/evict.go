package plugintest

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// move is an event, which may be the last one of its batch, or an ask and its answer.
type move struct {
	event  abi.Event
	last   bool
	ask    *abi.Ask
	answer []uint32
}

// evictChecks are the checks of an eviction policy.
type evictChecks struct{ *checker }

func (c evictChecks) evict() {
	rounds := cmp.Or(c.o.rounds, 1500)
	for _, g := range []struct {
		slots  uint32
		rounds int
	}{{1, min(rounds, 300)}, {7, rounds}, {200, rounds}, {3000, rounds}} {
		tape, err := c.record(c.o.Seed+uint64(g.slots), g.slots, g.rounds)
		if err != nil {
			c.r.add(err)
			continue // later checks would only repeat the finding
		}
		c.r.add(c.replay(tape, g.slots, 0, "another instance with the same seed and events",
			"decide by events and Info.seed alone, never by what memory happens to hold"))
		c.r.add(c.replay(tape, g.slots, 8, "with records 8 bytes longer",
			"step by the stride of the call, and read only what you know"))
		c.r.add(c.replay(noisy(tape), g.slots, 0, "with events it must ignore in between",
			"ignore ops you do not know, and ops on slots that are not in use"))
		c.r.add(c.handOver(tape, g.slots))
	}
	for _, export := range []string{abi.ExportEvents, abi.ExportStep} {
		if e, err := c.evictor(10, 0); err == nil {
			c.r.add(c.shortRecords(e.p, export))
			e.p.Close()
		}
	}
	c.r.add(c.ahead())
	c.r.add(c.overload(c.o.Slots))
}

// record plays a world against a new instance, judges each answer, and keeps the tape.
func (c evictChecks) record(seed uint64, slots uint32, rounds int) ([]move, error) {
	e, err := c.evictor(slots, 0)
	if err != nil {
		return nil, err
	}
	defer e.p.Close()
	// leave room for noise in each batch, since a policy may do work once per call
	e.batch = max(1, e.batch-e.batch/noiseEvery)
	var tape []move
	w := newWorld(seed, slots)
	fail := func(err error) {
		if err != nil && !w.over {
			w.over = true
			c.r.add(err)
		}
	}
	failed := false
	w.emit = func(ev abi.Event) {
		if !w.over {
			flushed, err := e.event(ev)
			tape = append(tape, move{event: ev, last: flushed})
			fail(err)
		}
	}
	w.ask = func(ask abi.Ask) []uint32 {
		out, err := e.step(ask)
		if err != nil {
			fail(err)
			return nil
		}
		if err := c.judge(w, ask, out); err != nil {
			failed = true
			c.r.add(err)
		}
		tape = append(tape, move{ask: &ask, answer: out})
		return out
	}
	w.fill(int(slots) / 4)
	for range rounds {
		if w.round(); w.over {
			break
		}
	}
	c.r.Memory = max(c.r.Memory, e.p.MemoryBytes())
	if w.named == 0 && w.wanted > 10 && !w.over && !failed {
		return nil, c.finding(abi.ExportStep, fmt.Sprintf("it named no victim in %d questions, with entries that could go",
			w.wanted), "name somebody: hosts evict by last touch in the place of a policy that does not, and end it")
	}
	if w.longest > policy.MaxSilences && !w.over && !failed {
		c.r.add(c.finding(abi.ExportStep, fmt.Sprintf("it named no victim in %d questions in a row, with entries that could go",
			w.longest), fmt.Sprintf("name somebody: more than %d of them are a fault", policy.MaxSilences)))
		failed = true
	}
	if w.over || failed {
		return nil, nil
	}
	return tape, nil
}

// judge checks one answer against the world.
func (c evictChecks) judge(w *world, ask abi.Ask, out []uint32) error {
	var freed uint64
	for i, slot := range out {
		n := w.slots[slot]
		switch {
		case n < 0:
			return c.finding(abi.ExportStep, fmt.Sprintf("victim %d of %d is slot %d, in which nothing is", i, len(out), slot),
				"forget a slot at its REMOVE")
		case w.nodes[n].pins > 0:
			return c.finding(abi.ExportStep, fmt.Sprintf("victim %d of %d is slot %d, which is pinned", i, len(out), slot),
				"leave slots out from PIN to UNPIN")
		case ask.Tenant != abi.None && w.nodes[n].tenant != ask.Tenant:
			return c.finding(abi.ExportStep, fmt.Sprintf("victim %d of %d is slot %d of tenant %d when tenant %d was asked for",
				i, len(out), slot, w.nodes[n].tenant, ask.Tenant), "mind ask.tenant")
		case freed >= ask.Bytes:
			return c.finding(abi.ExportStep, fmt.Sprintf("it names %d victims when %d free the %d bytes asked for", len(out), i,
				ask.Bytes), "stop when the sizes (times 4,096) add up to ask.bytes")
		}
		freed += uint64(w.nodes[n].size) * abi.SizeUnit
	}
	return nil
}

// replay plays a tape to a new instance, which must give the same answers.
func (c evictChecks) replay(tape []move, slots, longer uint32, how, do string) error {
	e, err := c.evictor(slots, longer)
	if err != nil {
		return err
	}
	defer e.p.Close()
	return e.follow(tape, 0, how, do)
}

func (e *evictor) follow(tape []move, from int, how, do string) error {
	for i := range tape {
		m := &tape[i]
		if m.ask == nil {
			if e.wait = append(e.wait, m.event); m.last {
				if err := e.flush(); err != nil {
					return err
				}
			}
			continue
		}
		got, err := e.step(*m.ask)
		if err != nil {
			return err
		}
		if !slices.Equal(got, m.answer) {
			return e.c.finding(abi.ExportStep, fmt.Sprintf("%s, it answers %v in place of %v (event %d, %d slots)", how,
				short(got), short(m.answer), from+i, e.slots), do)
		}
	}
	return nil
}

func short(v []uint32) string {
	if len(v) > 8 {
		return fmt.Sprintf("%v and %d more", v[:8], len(v)-8)
	}
	return fmt.Sprint(v)
}

// noiseEvery is the number of events of a batch with room for one meaningless event.
const noiseEvery = 8

// noisy adds meaningless events to a tape: unknown ops, and ops on empty slots.
func noisy(tape []move) []move {
	var out []move
	used := map[uint32]bool{}
	free := uint32(0)
	waited, added := 0, 0 // counts of this batch
	for i, m := range tape {
		if m.ask != nil {
			out = append(out, m)
			waited, added = 0, 0
			continue
		}
		switch m.event.Op {
		case abi.OpInsert, abi.OpResident:
			used[m.event.Slot] = true
		case abi.OpRemove:
			delete(used, m.event.Slot)
			free = m.event.Slot
		}
		last := m.last
		m.last = false
		out = append(out, m)
		if waited++; waited >= (noiseEvery-1)*(added+1) {
			added++
			noise := m.event
			noise.Op = []abi.Op{0, 9, 77, 255}[i%4]
			if !used[free] && added%2 == 0 {
				noise.Slot = free
				noise.Op = []abi.Op{abi.OpTouch, abi.OpPin, abi.OpUnpin, abi.OpRemove, abi.OpLink}[i%5]
			}
			out = append(out, move{event: noise})
		}
		if last {
			out[len(out)-1].last = true
			waited, added = 0, 0
		}
	}
	return out
}

// handOver saves the state half way and loads it into a new instance, which must give the same answers to the rest.
func (c evictChecks) handOver(tape []move, slots uint32) error {
	half := len(tape) / 2
	for half < len(tape) && (half == 0 || tape[half-1].ask == nil) {
		half++ // a host saves when no events wait
	}
	first, err := c.evictor(slots, 0)
	if err != nil {
		return err
	}
	defer first.p.Close()
	state, ok, err := c.saved(first, tape[:half])
	if err != nil || !ok {
		return err
	}
	second, err := c.evictor(slots, 0)
	if err != nil {
		return err
	}
	defer second.p.Close()
	taken, err := c.load(second.p, state)
	if err != nil {
		return err
	}
	if !taken {
		return c.finding(abi.ExportLoad, "it does not take the state that kv_save gave",
			"read what you write, or export neither")
	}
	err = second.follow(tape[half:], half, "after kv_save and kv_load", "save all that decisions follow from")
	if err != nil {
		return err
	}
	return c.garbage(state, slots)
}

func (c evictChecks) saved(e *evictor, tape []move) (state []byte, ok bool, err error) {
	if err := e.follow(tape, 0, "another instance with the same seed and events", "decide by events alone"); err != nil {
		return nil, false, err
	}
	if err := e.flush(); err != nil {
		return nil, false, err
	}
	return c.save(e.p)
}

// overload fills the largest instance and makes expensive asks: all old entries are pinned or belong to another tenant.
func (c evictChecks) overload(slots uint32) error {
	e, err := c.evictor(slots, 0)
	if err != nil {
		return err
	}
	defer e.p.Close()
	event := func(op abi.Op, slot uint32) {
		if err == nil {
			_, err = e.event(abi.Event{
				Op: op, Slot: slot, Parent: abi.None, Key: uint64(slot)*0x9e3779b97f4a7c15 | 1, Size: 1, Depth: slot % 50, Request: slot / 50,
				Tenant: b2u(slot >= slots-slots/8), Time: uint64(slot) * 1000,
			})
		}
	}
	for slot := range slots {
		event(abi.OpInsert, slot)
	}
	for slot := range slots / 2 {
		event(abi.OpPin, slot)
	}
	for _, tenant := range []uint32{abi.None, 1, 2, 0} {
		for _, most := range []uint32{1, 1024} {
			if err == nil {
				_, err = e.step(abi.Ask{Bytes: uint64(most) * abi.SizeUnit, MaxVictims: most, Tenant: tenant})
			}
		}
	}
	for slot := uint32(0); slot < slots; slot += 3 {
		event(abi.OpTouch, slot)
	}
	for slot := range slots {
		event(abi.OpRemove, slot)
	}
	if err != nil {
		return err
	}
	c.r.Memory = max(c.r.Memory, e.p.MemoryBytes())
	out, err := e.step(abi.Ask{Bytes: 1, MaxVictims: 16, Tenant: abi.None})
	if err == nil && len(out) > 0 {
		err = c.finding(abi.ExportStep, fmt.Sprintf("it names slot %d after everything was removed", out[0]),
			"forget a slot at its REMOVE")
	}
	return err
}

func b2u(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}
