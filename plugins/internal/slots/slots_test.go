package slots

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
)

const (
	listA List = 1
	listB List = 2
)

func insert(t *testing.T, tab *Table, slot, size, tenant uint32, l List) {
	t.Helper()
	if !tab.Insert(&abi.Event{Op: abi.OpInsert, Slot: slot, Key: uint64(slot) + 1, Size: size, Tenant: tenant}, l) {
		t.Fatalf("slot %d refused", slot)
	}
}

func table(t *testing.T, ghosts uint32) *Table {
	t.Helper()
	tab, err := NewTable(8, ghosts, listB)
	testenv.OK(t, err)
	return tab
}

func order(tab *Table, l List) (slots []uint32) {
	for i := tab.Back(l); i != None; i = tab.Before(i) {
		slots = append(slots, i)
	}
	return slots
}

func TestListsKeepOrderAndUnits(t *testing.T) {
	tab := table(t, 0)
	for s := range uint32(4) {
		insert(t, tab, s, s+1, 0, listA)
	}
	tab.MoveFront(listA, 1)
	tab.MoveFront(listB, 2)
	tab.Remove(0)
	if got := order(tab, listA); !slices.Equal(got, []uint32{3, 1}) {
		t.Errorf("list a is %v", got)
	}
	if got := order(tab, listB); !slices.Equal(got, []uint32{2}) {
		t.Errorf("list b is %v", got)
	}
	if tab.Units(listA) != 6 || tab.Len(listA) != 2 || tab.Units(listB) != 3 {
		t.Errorf("a has %d units in %d entries, b %d", tab.Units(listA), tab.Len(listA), tab.Units(listB))
	}
	if tab.Resident(0) || !tab.Resident(1) || tab.Resident(8) || tab.Resident(None) {
		t.Error("residents are wrong")
	}
	insert(t, tab, 1, 9, 0, listB) // an insert over an entry replaces it
	if tab.Units(listA) != 4 || tab.Units(listB) != 12 {
		t.Errorf("after a second insert a has %d units, b %d", tab.Units(listA), tab.Units(listB))
	}
	if tab.Insert(&abi.Event{Slot: 8}, listA) {
		t.Error("a slot out of range was taken")
	}
}

func TestNaming(t *testing.T) {
	for _, c := range []struct {
		name  string
		bytes uint64
		most  uint32
		owner uint32
		want  []uint32
	}{
		{"just enough", 3 * abi.SizeUnit, 8, abi.None, []uint32{0, 1}},
		{"a byte more", 3*abi.SizeUnit + 1, 8, abi.None, []uint32{0, 1, 3}},
		{"at most two", 100 * abi.SizeUnit, 2, abi.None, []uint32{0, 1}},
		{"one tenant", 100 * abi.SizeUnit, 8, 1, []uint32{1, 3, 5}},
		{"nothing", 0, 8, abi.None, nil},
		{"all it may", 1 << 40, 8, abi.None, []uint32{0, 1, 3, 4, 5}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tab := table(t, 0)
			for s := range uint32(6) {
				insert(t, tab, s, s+1, s%2, listA)
			}
			tab.Pin(&abi.Event{Op: abi.OpPin, Slot: 2})
			dst := make([]uint32, 8)
			a := tab.Ask(abi.Ask{Bytes: c.bytes, MaxVictims: c.most, Tenant: c.owner}, dst)
			a.NameFrom(tab.Back(listA))
			if got := dst[:a.Count()]; !slices.Equal(got, c.want) {
				t.Errorf("named %v, want %v", got, c.want)
			}
			left := tab.Units(listA)
			for _, s := range dst[:a.Count()] {
				left -= uint64(tab.At(s).Size)
			}
			if a.Left(listA) != left {
				t.Errorf("%d units left, want %d", a.Left(listA), left)
			}
		})
	}
}

func TestPinsNest(t *testing.T) {
	tab := table(t, 0)
	insert(t, tab, 0, 1, 0, listA)
	may := func() bool {
		a := tab.Ask(abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: abi.None}, make([]uint32, 1))
		return a.May(0)
	}
	for _, step := range []struct {
		op   abi.Op
		want bool
	}{{abi.OpPin, false}, {abi.OpPin, false}, {abi.OpUnpin, false}, {abi.OpUnpin, true}, {abi.OpUnpin, true}} {
		tab.Pin(&abi.Event{Op: step.op, Slot: 0})
		if may() != step.want {
			t.Errorf("after %s it may be named: %v", step.op, !step.want)
		}
	}
	tab.Pin(&abi.Event{Op: abi.OpPin, Slot: 0})
	tab.Remove(0)
	insert(t, tab, 0, 1, 0, listA)
	if !may() {
		t.Error("a pin outlived its entry")
	}
}

func TestEvictedIsWhatWasNamed(t *testing.T) {
	tab := table(t, 0)
	insert(t, tab, 0, 1, 0, listA)
	insert(t, tab, 1, 1, 0, listA)
	a := tab.Ask(abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: abi.None}, make([]uint32, 1))
	a.NameFrom(tab.Back(listA))
	if !tab.Evicted(0) || tab.Evicted(1) {
		t.Error("slot 0 was named, slot 1 was not")
	}
	tab.Remove(0)
	insert(t, tab, 0, 1, 0, listA)
	if tab.Evicted(0) {
		t.Error("a new entry was never named")
	}
}

// The ghosts' index against a map, with few fingerprints so that probes run into each other.
func TestGhostsAgainstAMap(t *testing.T) {
	const room = 40
	r := rand.New(rand.NewPCG(1, 1))
	tab := table(t, room)
	want := map[uint64]uint32{}
	for range 20000 {
		key := r.Uint64N(90) << 20 // poor fingerprints
		if node, ok := want[key]; ok != (tab.Ghost(key) != None) || ok && tab.Ghost(key) != node {
			t.Fatalf("fingerprint %d: ghost %d, want %d %v", key, tab.Ghost(key), node, ok)
		}
		switch node, ok := want[key]; {
		case ok && r.IntN(2) == 0:
			tab.DropGhost(node)
			delete(want, key)
		case len(want) < room || ok:
			if ok {
				tab.DropGhost(node)
			}
			node := tab.NewGhost(key, 3)
			if node < tab.slots {
				t.Fatalf("node %d is a slot", node)
			}
			tab.PushFront(listB, node)
			want[key] = node
		case tab.NewGhost(key, 3) != None:
			t.Fatal("a ghost found room where there is none")
		}
		if int(tab.left) != room-len(want) || int(tab.Len(listB)) != len(want) || tab.Units(listB) != 3*uint64(len(want)) {
			t.Fatalf("%d free, %d in the list, want %d ghosts", tab.left, tab.Len(listB), len(want))
		}
	}
}

func TestPushGhostForgetsTheOldest(t *testing.T) {
	tab := table(t, 3)
	for key := range uint64(5) {
		tab.PushGhost(listA, key, 2)
	}
	for key, want := range []bool{false, false, true, true, true} {
		if got := tab.Ghost(uint64(key)) != None; got != want {
			t.Errorf("fingerprint %d remembered: %v", key, got)
		}
	}
	if tab.TrimGhosts(listA, 3); tab.Len(listA) != 1 || tab.Ghost(4) == None {
		t.Errorf("%d ghosts after trimming", tab.Len(listA))
	}
}

func TestNoGhosts(t *testing.T) {
	tab := table(t, 0)
	if tab.PushGhost(listA, 1, 1); tab.Ghost(1) != None || tab.NewGhost(2, 1) != None {
		t.Error("a table without ghosts remembers")
	}
	if _, err := NewTable(0, 0, 1); err == nil {
		t.Error("a table without slots was made")
	}
	if _, err := NewTable(1<<31, 1<<31, 1); err == nil {
		t.Error("a table of 2^32 nodes was made")
	}
}

// TestSizeOfWhatWasWritten: an entry has the size of its last UNPIN, in its list too.
func TestSizeOfWhatWasWritten(t *testing.T) {
	tab := table(t, 0)
	insert(t, tab, 1, 10, 0, listA)
	insert(t, tab, 2, 10, 0, listA)
	tab.Pin(&abi.Event{Op: abi.OpPin, Slot: 1, Size: 10})
	tab.Pin(&abi.Event{Op: abi.OpUnpin, Slot: 1, Size: 7})
	if units := tab.Units(listA); units != 17 || tab.At(1).Size != 7 {
		t.Errorf("the list has %d units, the entry %d", units, tab.At(1).Size)
	}
	tab.Remove(1)
	if units := tab.Units(listA); units != 10 {
		t.Errorf("%d units are left", units)
	}
}

func TestArrayGrowsWithWhatIsMade(t *testing.T) {
	const n = 10*PageLen + 7
	a := NewArray[uint64](n, 42)
	if a.Len() != n || a.Made() != 0 || *a.At(0) != 42 || *a.At(n - 1) != 42 {
		t.Fatalf("a new array: %d elements, %d made, %d and %d", a.Len(), a.Made(), *a.At(0), *a.At(n - 1))
	}
	want := map[uint32]uint64{}
	for range 100 {
		i := rand.Uint32N(3*PageLen) + 4*PageLen
		want[i] = rand.Uint64()
		*a.Make(i) = want[i]
	}
	*a.Make(n - 1) = 1
	want[n-1] = 1
	if a.Made() != n {
		t.Errorf("%d elements are made, want all %d", a.Made(), n)
	}
	for i := range uint32(n) {
		v, ok := want[i]
		if !ok {
			v = 42
		}
		if *a.At(i) != v {
			t.Fatalf("element %d is %d, want %d", i, *a.At(i), v)
		}
	}
	if made := testing.AllocsPerRun(1, func() { a.Make(5 * PageLen) }); made != 0 {
		t.Errorf("a page that is there was made again: %v allocations", made)
	}
	if made := testing.AllocsPerRun(1, func() { b := NewArray[[64]byte](PageLen*1000, [64]byte{}); b.Make(0) }); made > 3 {
		t.Errorf("%v allocations for one page of a thousand", made)
	}
}

// A table of chains through an array finds what is in it, at every size.
func TestBucketsSplit(t *testing.T) {
	const n, none = 3000, 1<<32 - 1
	b := NewBuckets(n, none)
	next, hash := make([]uint32, n), make([]uint32, n)
	for i := range uint32(n) {
		hash[i] = rand.Uint32()
		head := b.Of(hash[i])
		next[i], *head = *head, i
		if old, made, bit, ok := b.Add(); ok {
			rest := *old
			*old = none
			for rest != none {
				to, j := old, rest
				if rest = next[j]; hash[j]&bit != 0 {
					to = made
				}
				next[j], *to = *to, j
			}
		} else if i != n-1 {
			t.Fatalf("no bucket after %d", i)
		}
		longest := 0
		for j := range i + 1 {
			at, steps := *b.Of(hash[j]), 0
			for ; at != j; at = next[at] {
				if steps++; at == none {
					t.Fatalf("entry %d is lost when there are %d", j, i)
				}
			}
			longest = max(longest, steps)
		}
		if longest > 24 {
			t.Fatalf("a chain of %d with %d entries in as many buckets", longest, i)
		}
	}
}
