package memfs

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// checked is an allocator beside a map of its pages.
type checked struct {
	allocator
	t     testing.TB
	owner [][]int // by step and page: number of the allocation, 0: free
	live  map[int][]extent
	last  int
}

func newChecked(t testing.TB, steps ...uint32) *checked {
	c := &checked{t: t, live: map[int][]extent{}}
	for _, n := range steps {
		c.add(n)
		c.owner = append(c.owner, make([]int, n))
	}
	return c
}

func (c *checked) longest() (n int64) {
	for _, s := range c.steps {
		n = max(n, int64(s.largest))
	}
	return n
}

// take allocates n pages. It returns 0 if there are not enough.
func (c *checked) take(n int64) int {
	c.t.Helper()
	free, longest := c.free, c.longest()
	got, ok := c.alloc(n, nil)
	if ok != (n <= free) {
		c.t.Fatalf("%d pages of %d free: %v", n, free, ok)
	}
	if !ok {
		if len(got) > 0 || c.free != free {
			c.t.Fatal("a failed allocation took pages")
		}
		return 0
	}
	if n <= longest && len(got) != 1 {
		c.t.Fatalf("%d extents for %d pages, although %d are free in a row", len(got), n, longest)
	}
	c.last++
	var sum int64
	for _, e := range got {
		for p := e.at; p < e.at+e.n; p++ {
			if c.owner[e.step][p] != 0 {
				c.t.Fatalf("page %d of step %d is in two allocations", p, e.step)
			}
			c.owner[e.step][p] = c.last
		}
		sum += int64(e.n)
	}
	if sum != n || c.free != free-n {
		c.t.Fatalf("%d pages instead of %d, %d free instead of %d", sum, n, c.free, free-n)
	}
	c.live[c.last] = got
	return c.last
}

func (c *checked) drop(id int) {
	for _, e := range c.live[id] {
		for p := e.at; p < e.at+e.n; p++ {
			c.owner[e.step][p] = 0
		}
		c.release(e)
	}
	delete(c.live, id)
}

// check compares the free runs with the map.
func (c *checked) check() {
	c.t.Helper()
	var free int64
	for s, owner := range c.owner {
		var want []run
		for p := 0; p < len(owner); p++ {
			at := p
			for p < len(owner) && owner[p] == 0 {
				p++
			}
			if p > at {
				want = append(want, run{uint32(at), uint32(p - at)})
				free += int64(p - at)
			}
		}
		if !slices.Equal(c.steps[s].runs, want) {
			c.t.Fatalf("step %d: runs %v, want %v", s, c.steps[s].runs, want)
		}
		largest := uint32(0)
		for _, r := range want {
			largest = max(largest, r.n)
		}
		if c.steps[s].largest != largest {
			c.t.Fatalf("step %d: longest run %d, want %d", s, c.steps[s].largest, largest)
		}
	}
	if c.free != free {
		c.t.Fatalf("%d free, want %d", c.free, free)
	}
}

// FuzzAllocator takes and frees as the bytes say: each is a length, or what to free.
func FuzzAllocator(f *testing.F) {
	f.Add([]byte{10, 20, 30, 128, 129, 40, 50, 130, 131})
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		b := make([]byte, 300)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, ops []byte) {
		c := newChecked(t, 100, 64, 1)
		var order []int
		for _, op := range ops {
			if n := int(op &^ 128); op < 128 {
				if id := c.take(int64(n) + 1); id != 0 {
					order = append(order, id)
				}
			} else if len(order) > 0 {
				i := n % len(order)
				c.drop(order[i])
				order = slices.Delete(order, i, i+1)
			}
			c.check()
		}
		for id := range c.live {
			c.drop(id)
		}
		c.check()
		if c.longest() != 100 {
			t.Fatal("free runs were not merged")
		}
	})
}

// extentsOf runs a full cache in which files of some sizes (in pages) replace each other, and returns the numbers of
// extents of the files that are left, sorted.
func extentsOf(t testing.TB, sizes []int64, oldestFirst bool, steps int, each uint32) (counts []int) {
	rng := rand.New(rand.NewPCG(7, 7))
	var list []uint32
	for range steps {
		list = append(list, each)
	}
	c := newChecked(t, list...)
	capacity := c.free * page
	keep := (capacity - Usable(capacity) - 16<<20) / page
	var order []int
	for range 20 * int(c.free) / int(slices.Max(sizes)) {
		n := sizes[rng.IntN(len(sizes))]
		for c.free-keep < n {
			i := 0
			if !oldestFirst {
				i = rng.IntN(len(order))
			}
			c.drop(order[i])
			order = slices.Delete(order, i, i+1)
		}
		order = append(order, c.take(n))
	}
	c.check()
	for _, id := range order {
		counts = append(counts, len(c.live[id]))
	}
	slices.Sort(counts)
	return counts
}

// In a full cache, files of one size are in one extent, except those at the ends of steps. Files of mixed sizes, which
// replace each other at random, are in few.
func TestFragmentation(t *testing.T) {
	testenv.Slow(t)
	const mib = 256
	llama, mla, odd := int64(32*mib+2), int64(17*mib+50), int64(5*mib+1)
	for _, c := range []struct {
		name        string
		sizes       []int64
		oldest      bool
		median, p99 int // at most
	}{
		{"one size", []int64{llama}, false, 1, 2},
		{"two models, oldest first", []int64{llama, mla}, true, 2, 4},
		{"two models, random", []int64{llama, mla}, false, 2, 4},
		{"three, random", []int64{llama, mla, odd}, false, 2, 6},
		{"from 1 to 32 MiB, random", []int64{mib, 2 * mib, 3*mib + 7, 9*mib + 1, odd, mla, llama}, false, 2, 8},
	} {
		counts := extentsOf(t, c.sizes, c.oldest, 16, 256*mib)
		median, p99, most := counts[len(counts)/2], counts[len(counts)*99/100], counts[len(counts)-1]
		t.Logf("%s: %d files, extents per file: median %d, p99 %d, most %d", c.name, len(counts), median, p99, most)
		if median > c.median || p99 > c.p99 {
			t.Errorf("%s: median %d, p99 %d extents; want at most %d and %d", c.name, median, p99, c.median, c.p99)
		}
	}
}
