package moves

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// piece is a source in memory.
type piece struct {
	b         []byte
	plan      *chunk.Plan
	reads     int
	cancelled func(reads int) bool
}

func (p *piece) Size() int64 { return int64(len(p.b)) }

func (p *piece) ReadAt(b []byte, off int64) (int, error) {
	p.reads++
	return copy(b, p.b[off:]), nil
}

func (p *piece) Verify(head []byte) (*Head, error) {
	h, err := pieceformat.DecodeHeader(head)
	if err != nil {
		return nil, err
	}
	out := &Head{Plan: p.plan, DataOffset: h.DataOffset}
	if int64(len(head)) >= h.DataOffset {
		out.Table, err = h.ReadTable(head[pieceformat.Page:], nil)
	}
	return out, err
}

func (p *piece) Cancelled() bool { return p.cancelled != nil && p.cancelled(p.reads) }

// upload is a target that takes parts in order, as object storage does.
type upload struct {
	b                  []byte
	committed, aborted bool
}

func (u *upload) WriteAt(b []byte, off int64) (int, error) {
	if off != int64(len(u.b)) || len(b)%pieceformat.Page != 0 {
		return 0, fmt.Errorf("a part of %d bytes at %d after %d", len(b), off, len(u.b))
	}
	u.b = append(u.b, b...)
	return len(b), nil
}

func (u *upload) Commit(context.Context) error { u.committed = true; return nil }
func (u *upload) Abort(error)                  { u.aborted = true }

// newPiece makes a piece of random bytes under a random layout: segments of odd sizes with gaps between them.
func newPiece(t testing.TB, r *rand.Rand) *piece {
	t.Helper()
	blocks := uint32(1 + r.IntN(4))
	g := chunk.Uniform(blocks, uint32(1+r.IntN(3)), uint32(1+r.IntN(2)), uint32(1+r.IntN(300_000)))
	var segments []abi.Segment
	for plane, p := range g.Planes {
		for off := uint32(0); off < p.PageBytes; {
			n := min(p.PageBytes-off, uint32(1+r.IntN(200_000)))
			segments = append(segments, abi.Segment{
				Plane: uint32(plane), Blocks: blocks, PageOff: off, PageLen: n, Gap: uint32(r.IntN(4096)),
			})
			off += n
		}
	}
	plan, err := chunk.NewPlan(g, segments)
	if err != nil {
		t.Fatal(err)
	}
	p := &piece{b: make([]byte, pieceformat.FileBytes(plan)), plan: plan}
	data := pieceformat.DataOffset(len(plan.Extents()), false)
	for i := data; i < data+plan.PayloadBytes(); i++ {
		p.b[i] = byte(r.Uint32())
	}
	table := make([]uint64, len(plan.Extents()))
	chunk.SumExtents(plan, 0, len(table), p.b[data:], 0, table)
	h := pieceformat.Header{
		Key: chunk.Key{1}, Blocks: blocks, Pieces: 1, Payload: plan.PayloadBytes(), Plan: plan.Digest(), Algorithm: chunk.XXH3,
		Extent: chunk.ExtentBytes, Extents: uint32(len(table)), DataOffset: data,
		TableSum: pieceformat.PutTable(p.b[pieceformat.Page:], table),
	}
	h.Encode(p.b)
	return p
}

func newCopier(perSecond int64) *Copier {
	b := &budget{loads: &Loads{}}
	b.perSecond.Store(perSecond)
	return &Copier{buf: make([]byte, bufferBytes), budget: b}
}

// TestCopy copies pieces of many layouts byte for byte, and commits none of which a byte under a checksum differs.
func TestCopy(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		p, u := newPiece(t, r), &upload{}
		begin := func(context.Context, *pieceformat.Header) (Target, error) { return u, nil }
		if n, err := newCopier(0).Copy(t.Context(), p, begin); err != nil || n != p.Size() {
			t.Fatalf("seed %d: %d of %d bytes: %v", seed, n, p.Size(), err)
		}
		if !u.committed || u.aborted || !bytes.Equal(u.b, p.b) {
			t.Fatalf("seed %d: the copy differs", seed)
		}
		e := p.plan.Extents()[r.IntN(len(p.plan.Extents()))]
		p.b[pieceformat.DataOffset(len(p.plan.Extents()), false)+e.Off+r.Int64N(int64(e.Len))] ^= 1
		u = &upload{}
		if _, err := newCopier(0).Copy(t.Context(), p, begin); !errors.Is(err, chunk.ErrChecksum) || u.committed || !u.aborted {
			t.Fatalf("seed %d: a damaged piece: %v, committed %v, aborted %v", seed, err, u.committed, u.aborted)
		}
	}
}

// TestCopyIsCancelled ends a copy within a part when its entry goes.
func TestCopyIsCancelled(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	p, u := newPiece(t, r), &upload{}
	for p.Size() < 3*PartBytes {
		p = newPiece(t, r)
	}
	p.cancelled = func(reads int) bool { return reads == 2 }
	_, err := newCopier(0).Copy(t.Context(), p, func(context.Context, *pieceformat.Header) (Target, error) { return u, nil })
	if !errors.Is(err, ErrCancelled) || u.committed || !u.aborted || p.reads != 2 {
		t.Errorf("%v after %d reads, committed %v, aborted %v", err, p.reads, u.committed, u.aborted)
	}
}

// FuzzCopy gives the copy whatever a file may hold: nothing is committed that differs from what its checksums say.
func FuzzCopy(f *testing.F) {
	p := newPiece(f, rand.New(rand.NewPCG(3, 3)))
	f.Add(uint32(0), byte(0))
	f.Add(uint32(len(p.b)-1), byte(1))
	f.Fuzz(func(t *testing.T, at uint32, flip byte) {
		q := &piece{b: bytes.Clone(p.b), plan: p.plan}
		q.b[int(at)%len(q.b)] ^= flip
		u := &upload{}
		_, err := newCopier(0).Copy(t.Context(), q, func(context.Context, *pieceformat.Header) (Target, error) { return u, nil })
		if (err == nil) != u.committed {
			t.Fatalf("%v, committed %v", err, u.committed)
		}
		if err == nil && !bytes.Equal(u.b, q.b) {
			t.Fatal("the copy differs")
		}
	})
}

// TestBudget: parts take the time that the bandwidth says, and wait for loads, but not for ever.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &budget{loads: &Loads{}}
		b.perSecond.Store(100 << 20)
		start := time.Now()
		for range 400 {
			if err := b.take(t.Context(), PartBytes); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(start); took < 900*time.Millisecond || took > 1100*time.Millisecond {
			t.Errorf("100 MiB at 100 MiB/s took %s", took)
		}
		c := &Copier{budget: &budget{loads: &Loads{}}}
		c.budget.loads.Begin()
		start = time.Now()
		for range 8 { // small pieces, which are a part together
			if err := c.take(t.Context(), PartBytes/8); err != nil || time.Since(start) != Patience {
				t.Errorf("%v after %s beside a load, want %s", err, time.Since(start), Patience)
			}
		}
		go func() { time.Sleep(time.Millisecond); c.budget.loads.End() }()
		start = time.Now()
		if err := c.take(t.Context(), PartBytes); err != nil || time.Since(start) != time.Millisecond {
			t.Errorf("%v after %s, the load had ended after 1ms", err, time.Since(start))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.take(ctx, PartBytes); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
