package policytest

import (
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// Abuse drives a policy with a random but legal stream of events and questions, and fails the test when an answer breaks
// the contract. The policy is the only judge of which entries go, but: every victim is resident, not pinned, of the
// tenant asked for and named once; no more are named than asked for; and it names fewer bytes than asked for only when
// it has named everything that it may.
func Abuse(t *testing.T, make_ Make, config guest.Config) {
	t.Helper()
	for seed := range uint64(6) {
		a := newAbuser(t, make_, config, seed)
		for range 40000 {
			a.step()
		}
		a.flush()
	}
}

type resident struct {
	key    uint64
	size   uint32
	tenant uint32
	pins   int
	here   bool
}

type abuser struct {
	t     *testing.T
	r     *rand.Rand
	p     guest.Evictor
	slots []resident
	used  uint64
	limit uint64 // units
	batch []abi.Event
	dst   []uint32
	clock uint64
}

func newAbuser(t *testing.T, make_ Make, config guest.Config, seed uint64) *abuser {
	const slots = 200
	limit := uint64(slots * 8)
	p, err := make_(guest.Info{
		MaxSlots: slots, MaxBatch: 256, MaxVictims: 32, Capacity: limit * abi.SizeUnit, Seed: seed, Config: config,
	})
	if err != nil {
		t.Fatal(err)
	}
	return &abuser{
		t: t, r: rand.New(rand.NewPCG(seed, 99)), p: p, slots: make([]resident, slots), limit: limit,
		batch: make([]abi.Event, 0, 256), dst: make([]uint32, 32),
	}
}

func (a *abuser) event(ev abi.Event) {
	a.clock++
	ev.Time = a.clock
	if a.batch = append(a.batch, ev); len(a.batch) == cap(a.batch) {
		a.flush()
	}
}

func (a *abuser) flush() {
	a.p.Events(a.batch)
	a.batch = a.batch[:0]
}

// pick is a random slot that holds an entry, or not.
func (a *abuser) pick(here bool) (uint32, bool) {
	for range 50 {
		s := a.r.Uint32N(uint32(len(a.slots)))
		if a.slots[s].here == here {
			return s, true
		}
	}
	return 0, false
}

func (a *abuser) step() {
	switch n := a.r.IntN(100); {
	case n < 45:
		if s, ok := a.pick(true); ok {
			a.event(abi.Event{Op: abi.OpTouch, Slot: s, Parent: abi.None, Key: a.slots[s].key, Size: a.slots[s].size})
		}
	case n < 75:
		a.insert()
	case n < 80:
		if s, ok := a.pick(true); ok {
			a.slots[s].pins++
			a.event(abi.Event{Op: abi.OpPin, Slot: s})
		}
	case n < 88:
		for range 20 {
			if s, ok := a.pick(true); ok && a.slots[s].pins > 0 {
				a.slots[s].pins--
				a.event(abi.Event{Op: abi.OpUnpin, Slot: s})
				break
			}
		}
	case n < 90:
		if s, ok := a.pick(true); ok && a.slots[s].pins == 0 {
			a.remove(s)
		}
	case n < 92:
		a.event(abi.Event{Op: abi.OpRequestEnd, Slot: abi.None, Request: 1})
	case n < 96:
		a.ask(uint64(a.r.IntN(60)), a.r.Uint32N(3), false)
	default:
		a.ask(uint64(a.r.IntN(200)), abi.None, a.r.IntN(2) == 0)
	}
}

func (a *abuser) insert() {
	s, ok := a.pick(false)
	if !ok {
		a.ask(16, abi.None, true)
		return
	}
	size := 1 + a.r.Uint32N(16)
	if over := a.used + uint64(size); over > a.limit {
		a.ask(over-a.limit, abi.None, true)
		if a.used+uint64(size) > a.limit {
			return
		}
	}
	op := abi.OpInsert
	if a.r.IntN(20) == 0 {
		op = abi.OpResident
	}
	a.slots[s] = resident{key: 1 + a.r.Uint64N(600), size: size, tenant: a.r.Uint32N(3), here: true}
	for o := range a.slots {
		if uint32(o) != s && a.slots[o].here && a.slots[o].key == a.slots[s].key {
			a.slots[s].key = a.r.Uint64() // it is resident: a host would not store it again
		}
	}
	e := &a.slots[s]
	a.used += uint64(size)
	a.event(abi.Event{Op: op, Slot: s, Parent: abi.None, Key: e.key, Size: size, Tenant: e.tenant, Depth: a.r.Uint32N(50)})
}

func (a *abuser) remove(s uint32) {
	a.used -= uint64(a.slots[s].size)
	a.slots[s] = resident{}
	a.event(abi.Event{Op: abi.OpRemove, Slot: s})
}

// ask asks for victims and judges the answer; then it takes all of them, or some.
func (a *abuser) ask(units uint64, tenant uint32, all bool) {
	a.t.Helper()
	a.flush()
	ask := abi.Ask{Bytes: units * abi.SizeUnit, MaxVictims: 1 + a.r.Uint32N(uint32(len(a.dst))), Tenant: tenant}
	if units > 0 {
		ask.Bytes -= uint64(a.r.IntN(abi.SizeUnit))
	}
	n := a.p.Victims(ask, a.dst)
	if n < 0 || n > int(ask.MaxVictims) {
		a.t.Fatalf("named %d victims of at most %d", n, ask.MaxVictims)
	}
	named := map[uint32]bool{}
	var freed uint64
	for i, s := range a.dst[:n] {
		switch {
		case s >= uint32(len(a.slots)) || !a.slots[s].here:
			a.t.Fatalf("victim %d, slot %d, is not resident", i, s)
		case a.slots[s].pins > 0:
			a.t.Fatalf("victim %d, slot %d, is pinned", i, s)
		case tenant != abi.None && a.slots[s].tenant != tenant:
			a.t.Fatalf("victim %d, slot %d, belongs to tenant %d, not %d", i, s, a.slots[s].tenant, tenant)
		case named[s]:
			a.t.Fatalf("slot %d named twice", s)
		case freed*abi.SizeUnit >= ask.Bytes:
			a.t.Fatalf("named a victim more than %d bytes take", ask.Bytes)
		}
		named[s] = true
		freed += uint64(a.slots[s].size)
	}
	if freed*abi.SizeUnit < ask.Bytes && n < int(ask.MaxVictims) {
		for s := range a.slots {
			e := &a.slots[s]
			if e.here && e.pins == 0 && !named[uint32(s)] && (tenant == abi.None || e.tenant == tenant) {
				a.t.Fatalf("named %d victims, %d bytes of %d, and left slot %d out", n, freed*abi.SizeUnit, ask.Bytes, s)
			}
		}
	}
	for _, s := range a.dst[:n] {
		if all || a.r.IntN(3) == 0 {
			a.remove(s)
		}
	}
}

// AllocatesNothing fails the test when a policy that has been made allocates.
func AllocatesNothing(t *testing.T, make_ Make, config guest.Config) {
	t.Helper()
	c := NewCache(t, make_, 200, config)
	stream := Conversations(20000)
	for _, key := range stream[:10000] {
		c.Access(key)
	}
	events := make([]abi.Event, 0, 3*len(stream))
	var asks []int // before which event victims are asked for
	record := &recorder{events: &events, asks: &asks, p: c.p}
	c.p = record
	for _, key := range stream[10000:] {
		c.Access(key)
	}
	c.flush()
	p, err := make_(Info(200, config))
	if err != nil {
		t.Fatal(err)
	}
	dst := make([]uint32, 1)
	at := 0
	allocs := testing.AllocsPerRun(1, func() {
		for _, upto := range asks {
			p.Events(events[at:upto])
			at = upto
			p.Victims(abi.Ask{Bytes: abi.SizeUnit, MaxVictims: 1, Tenant: abi.None}, dst)
		}
		at = 0
	})
	if allocs != 0 {
		t.Errorf("%v allocations in %d events", allocs, len(events))
	}
}

// recorder remembers what a policy was told.
type recorder struct {
	p      guest.Evictor
	events *[]abi.Event
	asks   *[]int
}

func (r *recorder) Events(batch []abi.Event) {
	*r.events = append(*r.events, batch...)
	r.p.Events(batch)
}

func (r *recorder) Victims(ask abi.Ask, dst []uint32) int {
	*r.asks = append(*r.asks, len(*r.events))
	return r.p.Victims(ask, dst)
}
