package prefix

import (
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// chats is a stream of conversations as a host would tell it, for a cache that is full.
type chats struct {
	r       *rand.Rand
	p       *Policy
	where   map[uint64]uint32
	keys    []uint64
	free    []uint32
	talks   [512][]uint64
	next    uint64
	request uint32
	clock   uint64
	batch   []abi.Event
	events  int
}

func newChats(b *testing.B, slots uint32) *chats {
	p, err := New(guest.Info{MaxSlots: slots, MaxVictims: 64, MaxBatch: 256})
	if err != nil {
		b.Fatal(err)
	}
	c := &chats{r: rand.New(rand.NewPCG(1, 1)), p: p, where: make(map[uint64]uint32, slots), keys: make([]uint64, slots)}
	for i := range slots {
		c.free = append(c.free, slots-1-i)
	}
	c.batch = make([]abi.Event, 0, 256)
	return c
}

func (c *chats) event(e abi.Event) {
	e.Time = c.clock
	if c.batch = append(c.batch, e); len(c.batch) == cap(c.batch) {
		c.flush()
	}
}

func (c *chats) flush() {
	c.p.Events(c.batch)
	c.events += len(c.batch)
	c.batch = c.batch[:0]
}

// turn plays one request of one conversation.
func (c *chats) turn() {
	c.clock += 300e6
	c.request++
	k := c.r.IntN(len(c.talks))
	if c.r.IntN(4) == 0 || len(c.talks[k]) > 300 {
		c.talks[k] = nil
	}
	for range 1 + c.r.IntN(8) {
		c.next++
		c.talks[k] = append(c.talks[k], c.next*0x9E3779B97F4A7C15)
	}
	parent := abi.None
	for depth, key := range c.talks[k] {
		slot, ok := c.where[key]
		e := abi.Event{Op: abi.OpTouch, Slot: slot, Parent: parent, Key: key, Size: 1, Depth: uint32(depth), Request: c.request}
		if !ok {
			if len(c.free) == 0 {
				c.evict()
			}
			slot = c.free[len(c.free)-1]
			c.free = c.free[:len(c.free)-1]
			c.where[key], c.keys[slot] = slot, key
			e.Op, e.Slot = abi.OpInsert, slot
		}
		c.event(e)
		parent = slot
	}
	c.event(abi.Event{Op: abi.OpRequestEnd, Slot: abi.None, Request: c.request})
}

func (c *chats) evict() {
	var dst [1]uint32
	c.flush()
	if c.p.Victims(abi.Ask{Bytes: 4096, MaxVictims: 1, Tenant: abi.None}, dst[:]) == 0 {
		panic("no victim")
	}
	delete(c.where, c.keys[dst[0]])
	c.free = append(c.free, dst[0])
	c.event(abi.Event{Op: abi.OpRemove, Slot: dst[0]})
}

// BenchmarkChats counts an event as one operation; the conversations' own upkeep is in it.
func BenchmarkChats(b *testing.B) {
	c := newChats(b, 10000)
	for range 2000 {
		c.turn()
	}
	b.ReportAllocs()
	b.ResetTimer()
	c.events = 0
	for c.events < b.N {
		c.turn()
	}
}

// BenchmarkRefit is the work that is spread over the requests between two fits.
func BenchmarkRefit(b *testing.B) {
	var m model
	m.init()
	for b.Loop() {
		for step := range fitSteps {
			m.fit(step)
		}
	}
}
