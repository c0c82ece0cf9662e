package replay

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/trace"
	"github.com/kvhost/kvhost/host/kv"
)

// A conversation stays with its session, though it shares a system prompt with all others.
func TestConversationsStayTogether(t *testing.T) {
	d := newDealer(4)
	next := uint64(1000)
	var talks [40][]uint64
	for i := range talks {
		talks[i] = []uint64{1, 2} // the system prompt
	}
	home := map[int]int{}
	for turn := range 5 {
		for i := range talks {
			talks[i] = append(talks[i], next)
			next++
			session := d.Deal(talks[i])
			if turn == 0 {
				home[i] = session
			} else if home[i] != session {
				t.Fatalf("turn %d of conversation %d went to session %d, the first to %d", turn, i, session, home[i])
			}
		}
	}
	per := map[int]int{}
	for _, s := range home {
		per[s]++
	}
	for s := range 4 {
		if per[s] < 5 {
			t.Errorf("session %d has %d of 40 conversations: %v", s, per[s], per)
		}
	}
}

// On a real mixture every session gets work. A single session gets all of it.
func TestWorkIsSpread(t *testing.T) {
	for _, n := range []int{1, 3, 8} {
		d := newDealer(n)
		work := make([]int, n)
		total := 0
		r, err := trace.Open("../../../examples/traces/mixed.jsonl.zst")
		testenv.OK(t, err)
		defer r.Close()
		for q := (trace.Request{}); r.Next(&q) == nil; {
			work[d.Deal(q.HashIDs)] += len(q.HashIDs)
			total += len(q.HashIDs)
		}
		if total == 0 {
			t.Fatal("the example trace is empty")
		}
		for s, w := range work {
			if w < total/n/4 {
				t.Errorf("%d sessions: session %d has %d of %d accesses: %v", n, s, w, total, work)
			}
		}
	}
	d := newDealer(2)
	for range 3 {
		d.Deal(nil) // a prompt shorter than a block
	}
}

func TestShapes(t *testing.T) {
	for _, test := range []struct {
		shape          Shape
		layers, blocks int
		page           uint32
		entry          int64
	}{
		{Shape{Ranks: 1, ChunkBytes: 64 << 10}, 2, 2, 16 << 10, 4096 + 4096 + 64<<10},
		{Shape{Ranks: 2, ChunkBytes: 64 << 10}, 2, 2, 16 << 10, 2 * (4096 + 4096 + 64<<10)},
		{Shape{Ranks: 1, ChunkBytes: 4096}, 1, 1, 4096, 3 * 4096},
		{Shape{Ranks: 1, ChunkBytes: 3 * 1000, PageBytes: 1000}, 1, 3, 1000, 3 * 4096},
		{Shape{Ranks: 1, ChunkBytes: 2 << 20, PageBytes: 64 << 10, Layers: 8}, 8, 4, 64 << 10, 4096 + 4096 + 2<<20},
		// 1,024 extents of 64 KiB need two pages of checksums.
		{Shape{Ranks: 1, ChunkBytes: 64 << 20, PageBytes: 64 << 10, Layers: 1}, 1, 1024, 64 << 10,
			4096 + 8192 + 64<<20},
	} {
		g, err := test.shape.Geometry()
		if err != nil {
			t.Fatalf("the geometry of %+v: %v", test.shape, err)
		}
		if len(g.Planes) != test.layers || int(g.Blocks) != test.blocks || g.Planes[0].PageBytes != test.page {
			t.Errorf("%+v: %d layers, %d blocks, pages of %d", test.shape, len(g.Planes), g.Blocks,
				g.Planes[0].PageBytes)
		}
		entry, err := test.shape.EntryBytes(t.Context(), nil, nil)
		if err != nil || entry != test.entry {
			t.Errorf("%+v: entry of %d bytes, %v; want %d", test.shape, entry, err, test.entry)
		}
	}
	for _, bad := range []Shape{
		{Ranks: 0, ChunkBytes: 4096}, {Ranks: kv.MaxRanks + 1, ChunkBytes: 4096}, {Ranks: 1},
		{Ranks: 1, ChunkBytes: 100, PageBytes: 64},
		{Ranks: 1, ChunkBytes: 4096, PageBytes: 8192}, {Ranks: 1, ChunkBytes: 4096, PageBytes: 1024, Layers: 3},
		{Ranks: 1, ChunkBytes: -1},
		{Ranks: 1, ChunkBytes: 4096, PageBytes: -4096}, {Ranks: 1, ChunkBytes: 4096, Layers: -1},
		{Ranks: 1, ChunkBytes: 1 << 40, PageBytes: 1},
	} {
		if _, err := bad.Namespace(); !errors.Is(err, ErrOptions) {
			t.Errorf("the namespace of %+v: got %v, want %v", bad, err, ErrOptions)
		}
	}
}
