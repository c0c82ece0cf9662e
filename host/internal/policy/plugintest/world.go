package plugintest

import (
	"math/rand/v2"
	"slices"

	"github.com/kvhost/kvhost/abi"
)

// world is a host's content: a tree of chunks that requests read and extend, some of them resident in slots. Unlike in
// a host, every event names the parent, and entries vanish while they are pinned.
type world struct {
	rng     *rand.Rand
	nodes   []node
	slots   []int // by slot: the node, or -1
	free    []uint32
	used    uint64 // in units of size
	limit   uint64
	clock   uint64
	request uint32
	held    []lease
	emit    func(abi.Event)
	ask     func(abi.Ask) []uint32 // victims; nil ends the world
	over    bool
	named   int // number of all victims
	wanted  int // asks that some entry could have answered
	silent  int // number of the latest asks in a row without an answer
	longest int // the largest value of silent
}

type node struct {
	key      uint64
	parent   int // node, or -1
	children []int
	depth    uint32
	size     uint32
	tenant   uint32
	slot     uint32 // or None
	pins     int
}

type lease struct {
	node  int
	until uint32 // number of the request that ends it
}

const tenants = 3

func newWorld(seed uint64, slots uint32) *world {
	w := &world{rng: rand.New(rand.NewPCG(seed, 17)), slots: make([]int, slots), limit: uint64(slots)*5 + 16}
	for s := range w.slots {
		w.slots[s] = -1
		w.free = append(w.free, slots-1-uint32(s))
	}
	return w
}

func (w *world) event(op abi.Op, n int) {
	w.clock += uint64(w.rng.IntN(2000))
	v := &w.nodes[n]
	ev := abi.Event{Op: op, Slot: v.slot, Parent: abi.None, Key: v.key, Size: v.size, Depth: v.depth, Request: w.request,
		Tenant: v.tenant, Time: w.clock}
	if v.parent >= 0 {
		ev.Parent, ev.ParentKey = w.nodes[v.parent].slot, w.nodes[v.parent].key
	}
	w.emit(ev)
}

// grow adds a child to a chunk.
func (w *world) grow(parent int) int {
	n := node{key: w.rng.Uint64() | 1, parent: parent, size: 1 + w.rng.Uint32N(10), tenant: w.rng.Uint32N(tenants),
		slot: abi.None}
	if parent >= 0 {
		n.depth = w.nodes[parent].depth + 1
		n.tenant = w.nodes[parent].tenant
		w.nodes[parent].children = append(w.nodes[parent].children, len(w.nodes))
	}
	w.nodes = append(w.nodes, n)
	return len(w.nodes) - 1
}

// fill makes entries resident as a host does at its start: by RESIDENT, in order of last touch.
func (w *world) fill(most int) {
	for range most {
		if len(w.free) == 0 || w.used+16 > w.limit {
			return
		}
		parent := -1
		if len(w.nodes) > 0 && w.rng.IntN(4) > 0 {
			parent = w.rng.IntN(len(w.nodes))
		}
		w.insert(w.grow(parent), abi.OpResident)
	}
}

// insert puts a chunk into a slot.
func (w *world) insert(n int, op abi.Op) {
	v := &w.nodes[n]
	v.slot = w.free[len(w.free)-1]
	w.free = w.free[:len(w.free)-1]
	w.slots[v.slot] = n
	w.used += uint64(v.size)
	w.event(op, n)
	for _, child := range v.children { // its parent is resident again
		if w.nodes[child].slot != abi.None {
			w.event(abi.OpLink, child)
		}
	}
}

func (w *world) remove(n int) {
	w.event(abi.OpRemove, n)
	v := &w.nodes[n]
	w.slots[v.slot] = -1
	w.free = append(w.free, v.slot)
	w.used -= uint64(v.size)
	v.slot, v.pins = abi.None, 0
}

// round makes a request: a lookup that leases the resident chunks, and stores of the missing ones.
func (w *world) round() {
	w.request++
	w.release()
	target := -1
	if len(w.nodes) > 0 {
		target = w.rng.IntN(len(w.nodes))
		if w.rng.IntN(3) > 0 { // prefer new chunks
			target = len(w.nodes) - 1 - w.rng.IntN(min(len(w.nodes), 40))
		}
	}
	if target < 0 || w.rng.IntN(8) == 0 {
		target = -1
	}
	for range w.rng.IntN(5) {
		if len(w.nodes) < 4*len(w.slots)+64 {
			target = w.grow(target)
		}
	}
	if target < 0 {
		return
	}
	var path []int
	for n := target; n >= 0; n = w.nodes[n].parent {
		path = append(path, n)
	}
	for i := len(path) - 1; i >= 0; i-- {
		if n := path[i]; w.nodes[n].slot != abi.None {
			w.event(abi.OpTouch, n)
			if w.rng.IntN(3) == 0 {
				w.pin(n, w.request+w.rng.Uint32N(6))
			}
		}
	}
	for i := len(path) - 1; i >= 0 && !w.over; i-- {
		if n := path[i]; w.nodes[n].slot == abi.None && w.makeRoom(uint64(w.nodes[n].size)) {
			w.insert(n, abi.OpInsert)
		}
	}
	w.clock++
	w.emit(abi.Event{Op: abi.OpRequestEnd, Slot: abi.None, Parent: abi.None, Request: w.request, Time: w.clock})
	w.oddities()
}

// oddities makes rare events happen.
func (w *world) oddities() {
	switch w.rng.IntN(20) {
	case 0: // a file vanished, pinned or not
		if n := w.slots[w.rng.IntN(len(w.slots))]; n >= 0 {
			w.remove(n)
		}
	case 1: // room for one tenant
		w.victims(abi.Ask{Bytes: uint64(1+w.rng.IntN(20)) * abi.SizeUnit, MaxVictims: 8, Tenant: w.rng.Uint32N(tenants + 1)},
			2)
	case 2: // an odd number of bytes, victims that mostly stay
		w.victims(abi.Ask{Bytes: uint64(w.rng.IntN(200_000)), MaxVictims: 1 + w.rng.Uint32N(40), Tenant: abi.None}, 5)
	case 3:
		w.victims(abi.Ask{MaxVictims: 4, Tenant: abi.None}, 1)
	case 4: // everything is leased
		for _, n := range w.slots {
			if n >= 0 && w.nodes[n].pins == 0 {
				w.pin(n, w.request+1)
			}
		}
		w.victims(abi.Ask{Bytes: 1 << 20, MaxVictims: 64, Tenant: abi.None}, 1)
	}
}

func (w *world) pin(n int, until uint32) {
	if w.nodes[n].pins++; w.nodes[n].pins == 1 {
		w.event(abi.OpPin, n)
	}
	w.held = append(w.held, lease{n, until})
}

// release ends the leases that are due.
func (w *world) release() {
	kept := w.held[:0]
	for _, l := range w.held {
		v := &w.nodes[l.node]
		if l.until > w.request {
			kept = append(kept, l)
			continue
		}
		if v.slot == abi.None || v.pins == 0 {
			continue // its REMOVE ended the lease
		}
		if v.pins--; v.pins == 0 {
			w.event(abi.OpUnpin, l.node)
		}
	}
	w.held = kept
}

// makeRoom evicts until an entry fits; the store is shed when that fails.
func (w *world) makeRoom(size uint64) bool {
	for range 4 {
		if len(w.free) > 0 && w.used+size <= w.limit {
			return true
		}
		need := uint64(1)
		if w.used+size > w.limit {
			need = w.used + size - w.limit
		}
		w.victims(abi.Ask{Bytes: need * abi.SizeUnit, MaxVictims: 64, Tenant: abi.None}, 1)
		if w.over {
			return false
		}
	}
	return len(w.free) > 0 && w.used+size <= w.limit
}

// victims asks for victims and removes every one-th of them.
func (w *world) victims(ask abi.Ask, one int) {
	if w.over {
		return
	}
	wanted := ask.Bytes > 0 && w.evictable(ask.Tenant)
	if wanted {
		w.wanted++
	}
	out := w.ask(ask)
	w.named += len(out)
	switch {
	case len(out) > 0:
		w.silent = 0
	case wanted:
		w.silent++
		w.longest = max(w.longest, w.silent)
	}
	for _, slot := range out {
		if n := w.slots[slot]; n >= 0 && w.nodes[n].pins == 0 && w.rng.IntN(one) == 0 {
			w.remove(n)
		}
	}
}

func (w *world) evictable(tenant uint32) bool {
	return slices.ContainsFunc(w.slots, func(n int) bool {
		return n >= 0 && w.nodes[n].pins == 0 && (tenant == abi.None || w.nodes[n].tenant == tenant)
	})
}
