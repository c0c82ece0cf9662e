package prefix

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
)

// world is a host in miniature: a tree of keys, slots, and requests that walk down the tree several at a time.
type world struct {
	t        *testing.T
	r        *rand.Rand
	p        *Policy
	slotOf   map[uint64]uint32
	keyOf    []uint64
	parent   map[uint64]uint64
	depth    map[uint64]uint32
	pins     []int
	tenant   []uint32
	free     []uint32
	clock    uint64
	nextKey  uint64
	answers  []uint32 // every victim, in order
	active   [4]walk
	requests uint32
	harsh    bool // also pins, forced removals and replays
}

// walk is one request: a path, and how far it has got.
type walk struct {
	id   uint32
	path []uint64
	at   int
}

func newWorld(t *testing.T, slots uint32, seed uint64, harsh bool) *world {
	p, err := New(guest.Info{MaxSlots: slots, MaxVictims: 16, MaxBatch: 64, Capacity: uint64(slots) * 4096})
	testenv.OK(t, err)
	w := &world{
		t: t, r: rand.New(rand.NewPCG(seed, 7)), p: p, harsh: harsh, slotOf: map[uint64]uint32{}, parent: map[uint64]uint64{},
		depth: map[uint64]uint32{}, keyOf: make([]uint64, slots), pins: make([]int, slots), tenant: make([]uint32, slots),
	}
	for i := range slots {
		w.free = append(w.free, slots-1-i)
	}
	return w
}

func (w *world) event(e abi.Event) {
	w.clock += uint64(w.r.IntN(1 << 26))
	e.Time = w.clock
	w.p.Events([]abi.Event{e})
}

func (w *world) parentSlot(key uint64) uint32 {
	if s, ok := w.slotOf[w.parent[key]]; ok && w.depth[key] > 0 {
		return s
	}
	return abi.None
}

func (w *world) newKey(parent uint64, depth uint32) uint64 {
	w.nextKey++
	w.parent[w.nextKey], w.depth[w.nextKey] = parent, depth
	return w.nextKey
}

// begin starts a request: a known path or a part of it, extended.
func (w *world) begin(k int) {
	var path []uint64
	if w.nextKey > 0 && w.r.IntN(3) > 0 {
		for key := 1 + w.r.Uint64N(w.nextKey); ; key = w.parent[key] {
			path = append(path, key)
			if w.depth[key] == 0 {
				break
			}
		}
		slices.Reverse(path)
	}
	for range w.r.IntN(12) + 1 {
		last := uint64(0)
		if len(path) > 0 {
			last = path[len(path)-1]
		}
		path = append(path, w.newKey(last, uint32(len(path))))
	}
	w.requests++
	w.active[k] = walk{id: w.requests, path: path}
}

// step moves one request by one chunk.
func (w *world) step() {
	k := w.r.IntN(len(w.active))
	a := &w.active[k]
	if a.at == len(a.path) {
		if a.id != 0 {
			w.event(abi.Event{Op: abi.OpRequestEnd, Slot: abi.None, Request: a.id})
		}
		w.begin(k)
		return
	}
	key := a.path[a.at]
	a.at++
	e := abi.Event{Key: key, Parent: w.parentSlot(key), ParentKey: w.parent[key], Size: 1, Depth: w.depth[key], Request: a.id}
	if s, ok := w.slotOf[key]; ok {
		e.Op, e.Slot = abi.OpTouch, s
		w.event(e)
		return
	}
	if len(w.free) == 0 && !w.evict(1+w.r.IntN(3), abi.None) {
		return
	}
	e.Op, e.Slot = abi.OpInsert, w.free[len(w.free)-1]
	w.free = w.free[:len(w.free)-1]
	e.Parent = w.parentSlot(key)
	e.Tenant = uint32(w.r.IntN(3))
	if w.harsh && w.r.IntN(50) == 0 {
		e.Op = abi.OpResident
	}
	w.slotOf[key], w.keyOf[e.Slot], w.tenant[e.Slot] = e.Slot, key, e.Tenant
	w.event(e)
	w.link(key)
	if w.harsh {
		w.harass()
	}
}

// link tells the children that are here that their parent is back.
func (w *world) link(key uint64) {
	for s, child := range w.keyOf {
		if child != 0 && w.parent[child] == key && w.depth[child] > 0 {
			w.event(abi.Event{Op: abi.OpLink, Slot: uint32(s), Parent: w.slotOf[key], Key: child})
		}
	}
}

func (w *world) harass() {
	i := uint32(w.r.IntN(len(w.keyOf)))
	if w.keyOf[i] == 0 {
		return
	}
	switch w.r.IntN(8) {
	case 0:
		w.pins[i]++
		w.event(abi.Event{Op: abi.OpPin, Slot: i})
	case 1, 2, 3:
		if w.pins[i] > 0 {
			w.pins[i]--
			w.event(abi.Event{Op: abi.OpUnpin, Slot: i})
		}
	case 4:
		if w.pins[i] == 0 {
			w.remove(i)
		}
	case 5:
		w.evict(2, uint32(w.r.IntN(3)))
	}
}

func (w *world) remove(i uint32) {
	delete(w.slotOf, w.keyOf[i])
	w.keyOf[i] = 0
	w.free = append(w.free, i)
	w.event(abi.Event{Op: abi.OpRemove, Slot: i})
}

// evict asks for victims, holds the answer against the world, and removes them.
func (w *world) evict(n int, tenant uint32) bool {
	dst := make([]uint32, n)
	best := w.slowWorst()
	dst = dst[:w.p.Victims(abi.Ask{Bytes: uint64(n) * 4096, MaxVictims: uint32(n), Tenant: tenant}, dst)]
	gone := map[uint32]bool{}
	for k, i := range dst {
		switch {
		case w.keyOf[i] == 0 || gone[i]:
			w.t.Fatalf("victim %d is not resident or named twice", i)
		case w.pins[i] > 0:
			w.t.Fatalf("victim %d is pinned", i)
		case tenant != abi.None && w.tenant[i] != tenant:
			w.t.Fatalf("victim %d is of tenant %d, asked for %d", i, w.tenant[i], tenant)
		}
		if k == 0 && tenant == abi.None && best != never {
			if got := w.p.worth(w.p.cellOf(w.p.segs.At(w.p.slots.At(i).seg))); got != best {
				w.t.Fatalf("victim %d is worth %d, the worst %d", i, got, best)
			}
		}
		gone[i] = true
		if w.harsh {
			continue
		}
		for key, s := range w.slotOf {
			if w.depth[key] > 0 && w.slotOf[w.parent[key]] == i && w.slotOf[w.parent[key]] != s && !gone[s] && w.keyOf[i] == w.parent[key] {
				w.t.Fatalf("victim %d has a resident child %d", i, s)
			}
		}
	}
	for _, i := range dst {
		w.remove(i)
	}
	w.answers = append(w.answers, dst...)
	return len(dst) > 0
}

// slowWorst is the least worth among all segments whose deepest chunk may go.
func (w *world) slowWorst() uint32 {
	p, least := w.p, uint32(never)
	for g := range p.used {
		s := p.segs.At(g)
		if !s.is(live) || s.any(ghost|touching) || p.slots.At(s.tail).kids > 0 || p.slots.At(s.tail).pins > 0 {
			continue
		}
		least = min(least, p.worth(p.cellOf(s)))
	}
	return least
}

func TestRandomStreams(t *testing.T) {
	for _, c := range []struct {
		name  string
		slots uint32
		harsh bool
		steps int
	}{
		{"tiny", 8, false, 4000}, {"small", 60, false, 12000}, {"medium", 400, false, 12000},
		{"tiny harsh", 8, true, 3000}, {"small harsh", 60, true, 6000},
	} {
		t.Run(c.name, func(t *testing.T) {
			for seed := range uint64(3) {
				w := newWorld(t, c.slots, seed, c.harsh)
				for k := range c.steps {
					w.step()
					if k%211 == 0 {
						w.p.check(t)
					}
				}
				w.p.check(t)
			}
		})
	}
}
