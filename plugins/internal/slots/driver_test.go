// The policies that are made of slots are tested natively here: each is driven as the host does it (victims, then removals, then the
// insert), and all answers compared with what they were when each was that of the algorithm as its paper gives it.
package slots_test

import (
	"fmt"
	"hash/fnv"
	"maps"
	"math/bits"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
)

// Make is a policy's constructor.
type Make func(guest.Info) (guest.Evictor, error)

// Of adapts a typed constructor.
func Of[P guest.Evictor](f func(guest.Info) (P, error)) Make {
	return func(i guest.Info) (guest.Evictor, error) { return f(i) }
}

// Fingerprint is the fingerprint a key has in events.
func Fingerprint(key uint64) uint64 {
	hi, lo := bits.Mul64(key^0x9e3779b97f4a7c15, 0xd6e8feb86659fd93)
	return hi ^ lo | 1
}

// Cache drives one policy as a host with entries of one unit would.
type Cache struct {
	t        testing.TB
	p        guest.Evictor
	slot     map[uint64]uint32
	keys     []uint64 // by slot
	capacity int
	clock    uint64
	batch    []abi.Event
	dst      []uint32
}

// NewCache makes a policy for so many entries.
func NewCache(t testing.TB, make_ Make, capacity int, config guest.Config) *Cache {
	t.Helper()
	p, err := make_(Info(capacity, config))
	testenv.OK(t, err)
	return &Cache{
		t: t, p: p, slot: make(map[uint64]uint32), keys: make([]uint64, capacity), capacity: capacity,
		batch: make([]abi.Event, 0, 256), dst: make([]uint32, 1),
	}
}

// Info is what a policy for so many entries of one unit is told.
func Info(capacity int, config guest.Config) guest.Info {
	return guest.Info{
		MaxSlots: uint32(capacity), MaxBatch: 256, MaxVictims: 1024,
		Capacity: uint64(capacity) * abi.SizeUnit, Seed: 1, Config: config,
	}
}

func (c *Cache) event(ev abi.Event) {
	c.clock++
	ev.Time = c.clock
	c.batch = append(c.batch, ev)
	if len(c.batch) == cap(c.batch) {
		c.flush()
	}
}

func (c *Cache) flush() {
	c.p.Events(c.batch)
	c.batch = c.batch[:0]
}

// Access looks the key up, and stores it when it is missing.
func (c *Cache) Access(key uint64) (hit bool, gone []uint64) {
	if slot, ok := c.slot[key]; ok {
		c.event(abi.Event{Op: abi.OpTouch, Slot: slot, Parent: abi.None, Key: Fingerprint(key), Size: 1})
		return true, nil
	}
	free := uint32(len(c.slot))
	if len(c.slot) == c.capacity {
		c.flush()
		if n := c.p.Victims(abi.Ask{Bytes: abi.SizeUnit, MaxVictims: 1, Tenant: abi.None}, c.dst); n != 1 {
			c.t.Fatalf("named %d victims, want 1", n)
		}
		free = c.dst[0]
		if free >= uint32(c.capacity) {
			c.t.Fatalf("named slot %d of %d", free, c.capacity)
		}
		gone = []uint64{c.keys[free]}
		delete(c.slot, c.keys[free])
		c.event(abi.Event{Op: abi.OpRemove, Slot: free})
	}
	c.slot[key], c.keys[free] = free, key
	c.event(abi.Event{Op: abi.OpInsert, Slot: free, Parent: abi.None, Key: Fingerprint(key), Size: 1})
	return false, gone
}

// Capacities are the cache sizes that are tried.
var Capacities = []int{1, 2, 3, 10, 57, 200, 333}

// Decisions is a digest of a policy's victims on all streams, with the accesses at which they went.
func Decisions(t *testing.T, make_ Make, config guest.Config) uint64 {
	t.Helper()
	h, streams := fnv.New64a(), Streams(20000)
	for _, name := range slices.Sorted(maps.Keys(streams)) {
		for _, capacity := range Capacities {
			c := NewCache(t, make_, capacity, config)
			for i, key := range streams[name] {
				if _, gone := c.Access(key); len(gone) > 0 {
					fmt.Fprintln(h, name, capacity, i, gone)
				}
			}
		}
	}
	return h.Sum64()
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
	testenv.OK(t, err)
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
