package server

import (
	"errors"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// What a LOAD says of layers is checked before anything is taken.
func TestLayerOrderIsChecked(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 1)
	for name, opt := range map[string]client.LoadOptions{
		"order alone":    {Order: []uint32{0, 1}},
		"prefetch alone": {Prefetch: 1},
		"twice":          {Layers: func(uint32, []int) {}, Order: []uint32{0, 0}},
		"short":          {Layers: func(uint32, []int) {}, Order: []uint32{1}},
		"unknown":        {Layers: func(uint32, []int) {}, Order: []uint32{0, 2}},
	} {
		job, err := p.Load(t.Context(), p.look(1), []client.LoadChunk{{Blocks: blocks(9)}}, opt)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := job.Wait(t.Context()); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A paced load goes on as its consumer does; an ADVANCE for a job that is over is answered.
func TestPacedLoad(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 3)
	l := p.look(3)
	var list []client.LoadChunk
	for i := range 3 {
		p.poison(i)
		list = append(list, client.LoadChunk{Index: i, Blocks: blocks(i)})
	}
	told := make(chan uint32, layers)
	job, err := p.Load(t.Context(), l, list, client.LoadOptions{Prefetch: 1,
		Layers: func(l uint32, _ []int) { told <- l }})
	if err != nil {
		t.Fatal(err)
	}
	if first := <-told; first != 0 {
		t.Fatalf("layer %d first", first)
	}
	for i := range 3 {
		for pl := parts; pl < planes; pl++ { // of layer 1
			if got := p.page(pl, blocks(i)[0]); !slices.Equal(got, make([]byte, pageBytes)) {
				t.Fatal("layer 1 has bytes before layer 0 is consumed")
			}
		}
	}
	if err := job.Advance(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if res := p.loaded(job); len(res.Failed) > 0 || <-told != 1 {
		t.Fatalf("%+v", res)
	}
	for i := range 3 {
		if !p.holds(i, i) {
			t.Errorf("chunk %d differs", i)
		}
	}
	if err := job.Advance(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
}

// A chunk that cannot be read fails its layers and its blocks, and no other; a session that ends leaves no paced load.
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
	job, err := p.Load(t.Context(), l, list,
		client.LoadOptions{Layers: func(_ uint32, failed []int) { told = append(told, failed) }})
	if err != nil {
		t.Fatal(err)
	}
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
		client.LoadOptions{Prefetch: 1, Layers: func(uint32, []int) {}}); err != nil {
		t.Fatal(err)
	}
	other.Close()
	until(t, "the session's load is over", func() bool {
		return r.server.Stats().Sessions == 1 &&
			r.server.Stats().Jobs == 0
	})
}
