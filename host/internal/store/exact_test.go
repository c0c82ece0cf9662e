package store

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/plugins/fifo"
)

func fifoModule() *policy.Module {
	return policy.NativeModule("fifo", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) { return fifo.New(i) })
}

// textbook is a cache of keys as the books have it: oldest first.
type textbook struct {
	order    []uint64
	capacity int
	recency  bool
}

func (c *textbook) hit(n uint64) bool {
	i := slices.Index(c.order, n)
	if i >= 0 && c.recency {
		c.order = append(slices.Delete(c.order, i, i+1), n)
	}
	return i >= 0
}

func (c *textbook) insert(n uint64) {
	if len(c.order) == c.capacity {
		c.order = c.order[1:]
	}
	c.order = append(c.order, n)
}

// TestTextbookOrder replays requests (the run of hits is looked up, the rest is stored) and compares each hit with what
// the same cache in a textbook gives; for lru across restarts too, because residents are replayed in order of last
// touch.
func TestTextbookOrder(t *testing.T) {
	for name, evict := range map[string]*policy.Module{"lru": nil, "fifo": fifoModule()} {
		t.Run(name, func(t *testing.T) {
			const capacity = 20
			f := newFixture(t, t.TempDir(), capacity, 1, func(c *Config) { c.Policies.Evict = handle(evict) })
			book := textbook{capacity: capacity, recency: evict == nil}
			rng := rand.New(rand.NewPCG(11, 12))
			for request := range 300 {
				list := requestKeys(rng)
				l := f.lookup(list...)
				want := 0
				for want < len(list) && book.hit(list[want]) {
					want++
				}
				if l.Hits() != want {
					t.Fatalf("request %d: %d hits, the textbook has %d", request, l.Hits(), want)
				}
				l.Release()
				for i, n := range list[want:] {
					parent := n
					if i+want > 0 {
						parent = list[i+want-1]
					}
					err := f.putUnder(n, parent, 0)
					if slices.Contains(book.order, n) {
						if !errors.Is(err, ErrResident) {
							t.Fatalf("request %d: key %d should be resident: %v", request, n, err)
						}
						continue
					}
					must(t, err)
					book.insert(n)
				}
				if request%60 == 59 && book.recency {
					f.restart()
				}
			}
			f.checkUsed()
		})
	}
}

// requestKeys is a chain: one of three beginnings, and one of its continuations.
func requestKeys(rng *rand.Rand) []uint64 {
	start := rng.Uint64N(3) * 100
	list := []uint64{start, start + 1}
	branch := start + 10*(1+rng.Uint64N(4))
	for i := range 1 + rng.Uint64N(6) {
		list = append(list, branch+i)
	}
	return list
}
