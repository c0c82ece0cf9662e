package server

import (
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
)

// A chunk that cannot be read fails its layers and its blocks, and no other; a session that ends leaves no load.
func TestLayersOfAChunkThatFails(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 3)
	l := p.look(3)
	r.faults.Set(faultfs.MustRules("read * 1st: eio")...)
	var list []client.LoadChunk
	for i := range 3 {
		p.poison(i)
		list = append(list, client.LoadChunk{Index: i, Blocks: blocks(i)})
	}
	var told [][]int
	job, err := p.Load(t.Context(), l, list, client.LoadOptions{Layers: func(_ uint32, failed []int) { told = append(told, failed) }})
	testenv.OK(t, err)
	res := p.loaded(job)
	if len(res.Failed) != chunkBlocks || len(told) != layers {
		t.Fatalf("%+v, layers %v", res, told)
	}
	bad := res.Failed[0].Chunk
	for _, f := range told {
		if !slices.Equal(f, []int{bad}) {
			t.Errorf("layers failed for %v, the load for chunk %d", told, bad)
		}
	}
	for i := range 3 {
		if i != bad && !p.holds(i, i) {
			t.Errorf("chunk %d differs", i)
		}
	}
	other := r.dial(nil)
	l = other.look(bad + 3)
	if l.Hits() == 0 {
		return // the first of the chain failed
	}
	if _, err := other.Load(t.Context(), l, list[:l.Hits()],
		client.LoadOptions{Layers: func(uint32, []int) {}}); err != nil {
		t.Fatal(err)
	}
	other.Close()
	until(t, "the session's load is over", func() bool {
		return r.server.Stats().Sessions == 1 &&
			r.server.Stats().Jobs == 0
	})
}
