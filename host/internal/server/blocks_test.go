package server

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// A client may say that a small file has millions of blocks, in every group: what the host keeps for a group does not
// grow with that.
func TestGroupsWithManyBlocks(t *testing.T) {
	const groups, size = 50, 4 << 20
	r := newRig(t, nil)
	h := r.hello()
	h.Namespace.Groups = nil
	for id := range uint32(groups) {
		h.Namespace.Groups = append(h.Namespace.Groups, kv.Group{ID: id, Geometry: kv.Uniform(1, 1, 1, 1)})
	}
	s, err := client.Dial(t.Context(), h)
	testenv.OK(t, err)
	defer s.Close()
	arena, err := client.NewArena(size)
	testenv.OK(t, err)
	defer arena.Close()
	before := heap()
	for id := range uint32(groups) {
		if _, err := s.Register(t.Context(), id, arena, []client.PlaneRegion{{Stride: 1, Blocks: size}}); err != nil {
			t.Fatal(err)
		}
		job, err := s.Store(t.Context(), 0, id, []client.StoreChunk{{Key: key(1), Blocks: []uint32{0}}})
		testenv.OK(t, err)
		if res, err := job.Published(t.Context()); err != nil || res.Chunks[0].Result != client.Stored {
			t.Fatal(res, err)
		}
		l, err := s.Lookup(t.Context(), client.LookupRequest{Group: id, Keys: []kv.Key{key(1)}})
		testenv.OK(t, err)
		load, err := s.Load(t.Context(), l, []client.LoadChunk{{Blocks: []uint32{size - 1}}}, client.LoadOptions{})
		testenv.OK(t, err)
		if res, err := load.Wait(t.Context()); err != nil || len(res.Failed) > 0 {
			t.Fatal(res, err)
		}
	}
	if grown := heap() - before; grown > groups<<20 {
		t.Errorf("%d groups on a file of %d bytes take %d MiB", groups, size, grown>>20)
	}
}

// heap is the memory of what is reachable.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A set finds what a map finds, also when many jobs use it one after the other.
func TestBlockSet(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var set blockSet
	for range 200 {
		n := rng.IntN(3000)
		set.Begin(n)
		seen := map[uint32]bool{}
		for range n {
			b := rng.Uint32N(uint32(n)) << rng.IntN(20)
			if got := set.Add(b); got == seen[b] {
				t.Fatalf("add(%d): %t, it was named before: %t", b, got, seen[b])
			}
			seen[b] = true
		}
	}
	set.Begin(1)
	set.Add(7)
	set.stamp = 1<<32 - 1
	if set.Begin(1); !set.Add(7) {
		t.Error("7 is left of a job before the stamps started again")
	}
}
