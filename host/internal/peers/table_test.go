package peers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime/debug"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// TestTable: the table says what sets would, through additions, removals, growth and lists that are dropped.
func TestTable(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var table Table
	var model [3]map[uint64]bool
	for i := range model {
		if list, ok := table.open(); !ok || list != i {
			t.Fatalf("list %d, %v, want %d", list, ok, i)
		}
		model[i] = map[uint64]bool{}
	}
	prints := make([]uint64, 20000)
	for i := range prints {
		prints[i] = random.Uint64()
	}
	for range 200000 {
		p, list := prints[random.IntN(len(prints))], random.IntN(len(model))
		if random.IntN(3) == 0 {
			table.remove(p, list)
			delete(model[list], p)
		} else {
			table.add(p, list)
			model[list][p] = true
		}
	}
	check := func() {
		t.Helper()
		for _, p := range prints {
			want := uint64(0)
			for i := range model {
				if model[i][p] {
					want |= 1 << i
				}
			}
			if got := table.at(p); got != want {
				t.Fatalf("fingerprint %x is in lists %b, want %b", p, got, want)
			}
		}
		for i := range model {
			if got := table.count[i].Load(); got != int64(len(model[i])) {
				t.Errorf("list %d has %d fingerprints, want %d", i, got, len(model[i]))
			}
		}
	}
	check()
	table.drop(1)
	clear(model[1])
	check()
	if list, ok := table.open(); !ok || list != 1 {
		t.Errorf("the list given next is %d, %v, want the one that was dropped", list, ok)
	}
}

// TestTableMemory: an entry takes 20 to 24 bytes however many peers have it.
func TestTableMemory(t *testing.T) {
	testenv.Slow(t)
	var table Table
	random := rand.New(rand.NewPCG(3, 4))
	const entries = 1 << 20
	for range entries {
		p := random.Uint64()
		table.add(p, 0)
		table.add(p, 1)
	}
	if per := float64(table.cells.Load()*cellBytes) / entries; per < 20 || per > 24.5 {
		t.Errorf("%.1f bytes an entry, want 20 to 24", per)
	} else {
		t.Logf("%.1f bytes an entry", per)
	}
}

// TestTableShares: one peer that tells of more than there is memory for does not keep others from being heard.
func TestTableShares(t *testing.T) {
	testenv.Slow(t)
	const many, few = 1 << 19, 12_000
	table := Table{most: 4 << 20}
	random := rand.New(rand.NewPCG(5, 6))
	for list, n := range []int{many, few} {
		if got, ok := table.open(); !ok || got != list {
			t.Fatalf("list %d, %v, want %d", got, ok, list)
		}
		for range n {
			table.add(random.Uint64(), list)
		}
	}
	if n := table.count[1].Load(); n != few {
		t.Errorf("%d fingerprints of a peer are kept after another told too many, want %d", n, few)
	}
	if n := table.count[0].Load(); n < many/4 {
		t.Errorf("%d fingerprints of that one are kept, want most of the memory used", n)
	}
	if n := table.cells.Load() * cellBytes; n > table.most {
		t.Errorf("%d bytes, want at most %d", n, table.most)
	}
}

// TestTableAsTheKernelCounts: peers that tell of more than there is memory for have the process take no more than the bound, and what it
// has of a shard twice.
func TestTableAsTheKernelCounts(t *testing.T) {
	testenv.Slow(t)
	const own = "KVHOST_TEST_TABLE" // a process of its own: what other tests leave to be collected is none of the table's
	if os.Getenv(own) == "" {
		c := exec.Command(os.Args[0], "-test.v", "-test.run=^TestTableAsTheKernelCounts$")
		c.Env = append(os.Environ(), own+"=1")
		out, err := c.CombinedOutput()
		if t.Logf("%s", out); err != nil {
			t.Error(err)
		}
		return
	}
	const most, prints, slack = 64 << 20, 5 << 20, 8 << 20
	table := Table{most: most}
	resident := func() int64 {
		text, err := os.ReadFile("/proc/self/statm")
		testenv.OK(t, err)
		var size, pages int64
		_, err = fmt.Sscan(string(text), &size, &pages)
		testenv.OK(t, err)
		return pages * int64(os.Getpagesize())
	}
	for range 2 {
		table.open()
	}
	random := rand.New(rand.NewPCG(7, 8))
	debug.FreeOSMemory()
	before, peak := resident(), int64(0)
	for i := range prints {
		table.add(random.Uint64(), i%2)
		if i%(1<<15) == 0 {
			peak = max(peak, resident()-before)
		}
	}
	t.Logf("%d MiB of cells, the process took %d MiB more at most, %d fingerprints were not kept", table.cells.Load()*cellBytes>>20, peak>>20,
		table.full.Load())
	if table.full.Load() == 0 || table.cells.Load()*cellBytes < most/4*3 {
		t.Fatal("the table was not full")
	}
	if peak > most+slack {
		t.Errorf("the process took %d bytes more, want at most %d", peak, most+slack)
	}
}

// FuzzLearn: no message breaks the table, and one that is whole is learned.
func FuzzLearn(f *testing.F) {
	f.Add([]byte("12345678"), []byte("87654321"))
	f.Add([]byte{}, []byte{1})
	f.Fuzz(func(t *testing.T, added, removed []byte) {
		var table Table
		list, _ := table.open()
		err := table.learn(list, added, removed)
		if bad := len(added)%8 != 0 || len(removed)%8 != 0; bad != errors.Is(err, ErrMessage) {
			t.Fatalf("%d and %d bytes: %v", len(added), len(removed), err)
		}
		for ; err == nil && len(added) > 0; added = added[8:] {
			if p := binary.LittleEndian.Uint64(added); p != 0 && table.at(p) != 1<<list {
				t.Fatalf("fingerprint %x was not learned", p)
			}
		}
	})
}

// TestTableChosenPrints: a peer that chooses its fingerprints next to each other makes no search long.
func TestTableChosenPrints(t *testing.T) {
	const n, start = 1 << 14, 0x4242 << 48
	var table Table
	for i := range uint64(n) {
		table.add(start+i, 3)
	}
	longest := 0
	for i := range table.shards {
		run := 0
		for j := range table.shards[i].all() {
			if run++; table.shards[i].all()[j].print.Load() == 0 {
				run = 0
			}
			longest = max(longest, run)
		}
	}
	if longest > n/8 {
		t.Errorf("a search passes %d cells of %d fingerprints, want few", longest, n)
	}
	for i := range uint64(n) {
		if table.at(start+i) != 1<<3 {
			t.Fatalf("fingerprint %d is not found", i)
		}
	}
}
