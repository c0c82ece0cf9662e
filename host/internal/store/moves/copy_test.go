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
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// piece is a source in memory.
type piece struct {
	b         []byte
	plan      *kv.Plan
	reads     int
	decoded   int64
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
	out := &Head{}
	return out, out.Read(&h, p.plan, head)
}

func (p *piece) Decoded(pages, _ int64, _ time.Duration) { p.decoded += pages }

func (p *piece) Cancelled() bool { return p.cancelled != nil && p.cancelled(p.reads) }

// upload is a target that takes parts in order, as object storage does.
type upload struct {
	b                                               []byte
	decodes, compresses, headed, committed, aborted bool

	plan    *kv.Plan // of compresses
	name    string
	encoded int64
}

func (u *upload) Decodes() bool                    { return u.decodes }
func (u *upload) Compresses() bool                 { return u.compresses }
func (u *upload) Element() int                     { return 2 }
func (u *upload) Name() string                     { return u.name }
func (u *upload) Encoded(n int64, _ time.Duration) { u.encoded += n }

func (u *upload) HeadStored(dst []byte, table []uint64, stored []pieceformat.Stored) int64 {
	u.headed = true
	h := headerOf(u.plan)
	h.Stored, h.DataOffset = pieceformat.StoredBytes(stored), int64(len(dst))
	h.TableSum = pieceformat.PutStored(dst[pieceformat.Page:], table, stored)
	h.Encode(dst)
	return h.FileBytes()
}

func (u *upload) WriteAt(b []byte, off int64) (int, error) {
	if u.compresses && u.b == nil {
		u.b = make([]byte, off) // the head comes last
	}
	if u.headed && off == 0 {
		return copy(u.b, b), nil
	}
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
	g := kv.Uniform(blocks, uint32(1+r.IntN(3)), uint32(1+r.IntN(2)), uint32(1+r.IntN(300_000)))
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
	plan, err := kv.NewPlan(g, segments)
	must(t, err)
	return pieceOf(plan, r)
}

// pieceOf makes a piece of random bytes under a layout.
func pieceOf(plan *kv.Plan, r *rand.Rand) *piece {
	p := &piece{b: make([]byte, pieceformat.FileBytes(plan)), plan: plan}
	data := pieceformat.DataOffset(len(plan.Extents()), false)
	testenv.Fill(p.b[data:data+plan.PayloadBytes()], r.Uint64())
	table := make([]uint64, len(plan.Extents()))
	kv.SumExtents(plan, 0, len(table), p.b[data:], 0, table)
	h := headerOf(plan)
	h.DataOffset, h.TableSum = data, pieceformat.PutTable(p.b[pieceformat.Page:], table)
	h.Encode(p.b)
	return p
}

// headerOf is that of a piece, without what its version decides.
func headerOf(plan *kv.Plan) pieceformat.Header {
	return pieceformat.Header{
		Key: kv.Key{1}, Blocks: plan.Geometry().Blocks, Pieces: 1, Payload: plan.PayloadBytes(), Plan: plan.Digest(), Algorithm: kv.XXH3,
		Extent: kv.ExtentBytes, Extents: uint32(len(plan.Extents())),
	}
}

// compressed is the piece in version 2. Of its extents some are of floats, some of one byte, and some random.
func (p *piece) compressed(r *rand.Rand) (v1, v2 *piece) {
	h, err := pieceformat.DecodeHeader(p.b)
	if err != nil {
		panic(err)
	}
	extents := p.plan.Extents()
	data := p.b[h.DataOffset:]
	v2 = &piece{b: make([]byte, pieceformat.MostBytes(p.plan)), plan: p.plan}
	table, stored := make([]uint64, len(extents)), make([]pieceformat.Stored, len(extents))
	h2 := h
	h2.DataOffset = pieceformat.DataOffset(len(extents), true)
	at := h2.DataOffset
	for i, e := range extents {
		page := data[e.Off:][:e.Len]
		for j := range page {
			switch i % 3 {
			case 0:
				page[j] = byte(i)
			case 1:
				if j%2 == 1 {
					page[j] = byte(60 + r.NormFloat64())
				}
			}
		}
		n, by := codec.Encode(v2.b[at:], page, 1+i%3%2)
		table[i] = kv.Sum(page)
		stored[i] = pieceformat.Stored{Sum: kv.Sum(v2.b[at:][:n]), Len: uint32(n), Codec: uint8(by)}
		at += int64(n)
	}
	clear(v2.b[at:])
	h.TableSum = pieceformat.PutTable(p.b[pieceformat.Page:], table)
	h.Encode(p.b)
	for _, gap := range gaps(p.plan) { // the decoder writes zeros
		clear(data[gap[0]:gap[1]])
	}
	h2.Stored = pieceformat.StoredBytes(stored)
	h2.TableSum = pieceformat.PutStored(v2.b[pieceformat.Page:], table, stored)
	h2.Encode(v2.b)
	v2.b = v2.b[:h2.FileBytes()]
	return p, v2
}

// gaps are the bytes of a payload that are under no checksum.
func gaps(plan *kv.Plan) (list [][2]int64) {
	at := int64(0)
	for _, e := range plan.Extents() {
		list = append(list, [2]int64{at, e.Off})
		at = e.Off + int64(e.Len)
	}
	return append(list, [2]int64{at, plan.PayloadBytes()})
}

// TestCopyOfCompressed copies compressed pieces as they are, and as version 1 where the target must not hold them. A flipped
// bit in a stored extent is found before it is decoded, and nothing is committed.
func TestCopyOfCompressed(t *testing.T) {
	testenv.Slow(t)
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 2))
		v1, v2 := newPiece(t, r).compressed(r)
		for decodes, want := range map[bool]*piece{false: v2, true: v1} {
			u := &upload{decodes: decodes}
			begin := func(context.Context, *pieceformat.Header) (Target, error) { return u, nil }
			if n, err := newCopier(0).Copy(t.Context(), v2, begin); err != nil || n != v2.Size() {
				t.Fatalf("seed %d: %d of %d bytes: %v", seed, n, v2.Size(), err)
			}
			if !u.committed || !bytes.Equal(u.b, want.b) {
				t.Fatalf("seed %d: the copy differs, decoded: %t", seed, decodes)
			}
			h, err := pieceformat.DecodeHeader(v2.b)
			must(t, err)
			bad := &piece{b: bytes.Clone(v2.b), plan: v2.plan}
			bad.b[h.DataOffset+r.Int64N(h.Stored)] ^= 1 << r.IntN(8)
			u = &upload{decodes: decodes}
			if _, err := newCopier(0).Copy(t.Context(), bad, begin); !errors.Is(err, kv.ErrChecksum) || u.committed || !u.aborted {
				t.Fatalf("seed %d: a damaged piece: %v, committed %v, aborted %v", seed, err, u.committed, u.aborted)
			}
		}
	}
}

// TestCopyIsCompressed copies pieces of version 1 to a target that holds compressed ones, and back. A flipped bit in a page is
// found before it is encoded, and nothing is committed.
func TestCopyIsCompressed(t *testing.T) {
	testenv.Slow(t)
	saved := 0
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 2))
		v1, _ := newPiece(t, r).compressed(r)
		u := &upload{compresses: true, plan: v1.plan}
		into := func(u *upload) Begin {
			return func(context.Context, *pieceformat.Header) (Target, error) { return u, nil }
		}
		if n, err := newCopier(0).Copy(t.Context(), v1, into(u)); err != nil || n != v1.Size() || !u.committed {
			t.Fatalf("seed %d: %d of %d bytes, committed %t: %v", seed, n, v1.Size(), u.committed, err)
		}
		h, err := pieceformat.DecodeHeader(u.b)
		if err != nil || h.Version() != pieceformat.CompressedVersion || h.FileBytes() != int64(len(u.b)) || h.Stored != u.encoded {
			t.Fatalf("seed %d: %+v of %d bytes, %d encoded: %v", seed, h, len(u.b), u.encoded, err)
		}
		saved += len(v1.b) - len(u.b)
		back := &upload{decodes: true}
		v2 := &piece{b: u.b, plan: v1.plan}
		if _, err := newCopier(0).Copy(t.Context(), v2, into(back)); err != nil || !bytes.Equal(back.b, v1.b) {
			t.Fatalf("seed %d: the way back differs: %v", seed, err)
		}
		pages := int64(0)
		for _, e := range v1.plan.Extents() {
			pages += int64(e.Len)
		}
		if v2.decoded != pages {
			t.Fatalf("seed %d: %d bytes were entered as decoded, want %d", seed, v2.decoded, pages)
		}
		bad := &piece{b: bytes.Clone(v1.b), plan: v1.plan}
		e := v1.plan.Extents()[r.IntN(len(v1.plan.Extents()))]
		bad.b[pieceformat.DataOffset(len(v1.plan.Extents()), false)+e.Off+r.Int64N(int64(e.Len))] ^= 1 << r.IntN(8)
		u = &upload{compresses: true, plan: v1.plan}
		if _, err := newCopier(0).Copy(t.Context(), bad, into(u)); !errors.Is(err, kv.ErrChecksum) || u.committed || !u.aborted {
			t.Fatalf("seed %d: a damaged piece: %v, committed %v, aborted %v", seed, err, u.committed, u.aborted)
		}
	}
	if saved <= 0 {
		t.Errorf("%d bytes were saved", saved)
	}
}

// TestCopyOfGarbage decodes an extent that has the right checksum, and is not what an encoder wrote.
func TestCopyOfGarbage(t *testing.T) {
	testenv.Slow(t)
	r := rand.New(rand.NewPCG(9, 2))
	_, v2 := newPiece(t, r).compressed(r)
	h, err := pieceformat.DecodeHeader(v2.b)
	must(t, err)
	table, stored, err := h.ReadStored(v2.b[pieceformat.Page:], v2.plan.Extents(), nil, nil)
	if err != nil || stored[0].Codec == 0 {
		t.Fatalf("the first extent is stored as %+v, error %v, want it compressed", stored[0], err)
	}
	extent := v2.b[h.DataOffset:][:stored[0].Len]
	extent[0] = 99
	stored[0].Sum = kv.Sum(extent)
	h.TableSum = pieceformat.PutStored(v2.b[pieceformat.Page:], table, stored)
	h.Encode(v2.b)
	u := &upload{decodes: true}
	_, err = newCopier(0).Copy(t.Context(), v2, func(context.Context, *pieceformat.Header) (Target, error) { return u, nil })
	if !pieceformat.IsDamage(err) || u.committed || !u.aborted {
		t.Errorf("%v, committed %v, aborted %v", err, u.committed, u.aborted)
	}
}

func newCopier(perSecond int64) *Copier {
	b := &budget{loads: &Loads{}}
	b.rate.PerSecond = perSecond
	return &Copier{buf: make([]byte, bufferBytes), budget: b}
}

// TestCopy copies pieces of many layouts byte for byte, and commits none of which a byte under a checksum differs.
func TestCopy(t *testing.T) {
	testenv.Slow(t)
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
		if _, err := newCopier(0).Copy(t.Context(), p, begin); !errors.Is(err, kv.ErrChecksum) || u.committed || !u.aborted {
			t.Fatalf("seed %d: a damaged piece: %v, committed %v, aborted %v", seed, err, u.committed, u.aborted)
		}
	}
}

// TestCopyOfManyExtents: a piece with a table that no part holds is not copied, and not taken for a damaged one.
func TestCopyOfManyExtents(t *testing.T) {
	testenv.Slow(t)
	const bytes = 40_000
	segments := make([]abi.Segment, bytes) // of one byte each
	for i := range segments {
		segments[i] = abi.Segment{Blocks: 1, PageOff: uint32(i), PageLen: 1}
	}
	plan, err := kv.NewPlan(kv.Uniform(1, 1, 1, bytes), segments)
	must(t, err)
	_, err = newCopier(0).Copy(t.Context(), pieceOf(plan, rand.New(rand.NewPCG(1, 3))),
		func(context.Context, *pieceformat.Header) (Target, error) {
			t.Error("its copy was begun")
			return &upload{}, nil
		})
	if !errors.Is(err, ErrTable) || pieceformat.IsDamage(err) {
		t.Error(err)
	}
}

// TestCopyIsCancelled ends a copy within a part when its entry goes.
func TestCopyIsCancelled(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	p, u := newPiece(t, r), &upload{}
	for p.Size() < 3*partBytes {
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
	r := rand.New(rand.NewPCG(3, 4))
	_, v2 := newPiece(f, r).compressed(r)
	f.Add(uint32(0), byte(0), false, false)
	f.Add(uint32(len(p.b)-1), byte(1), false, false)
	f.Add(uint32(0), byte(0), true, true)
	f.Add(uint32(2*pieceformat.Page), byte(1), true, true)
	f.Add(uint32(2*pieceformat.Page), byte(1), false, true)
	f.Fuzz(func(t *testing.T, at uint32, flip byte, compressed, recodes bool) {
		p := p
		if compressed {
			p = v2
		}
		q := &piece{b: bytes.Clone(p.b), plan: p.plan}
		q.b[int(at)%len(q.b)] ^= flip
		u := &upload{decodes: recodes, compresses: recodes && !compressed, plan: p.plan}
		_, err := newCopier(0).Copy(t.Context(), q, func(context.Context, *pieceformat.Header) (Target, error) { return u, nil })
		if (err == nil) != u.committed {
			t.Fatalf("%v, committed %v", err, u.committed)
		}
		if err == nil && !recodes && !bytes.Equal(u.b, q.b) {
			t.Fatal("the copy differs")
		}
	})
}

// TestBudget: parts take the time that the bandwidth says, and wait for loads, but not for ever.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &budget{loads: &Loads{}}
		b.rate.PerSecond = 100 << 20
		start := time.Now()
		for range 400 {
			must(t, b.take(t.Context(), partBytes))
		}
		if took := time.Since(start); took < 900*time.Millisecond || took > 1100*time.Millisecond {
			t.Errorf("100 MiB at 100 MiB/s took %s", took)
		}
		c := &Copier{budget: &budget{loads: &Loads{}}}
		c.budget.loads.Begin()
		start = time.Now()
		for range 8 { // small pieces, which are a part together
			if err := c.take(t.Context(), partBytes/8); err != nil || time.Since(start) != patience {
				t.Errorf("%v after %s beside a load, want %s", err, time.Since(start), patience)
			}
		}
		go func() { time.Sleep(time.Millisecond); c.budget.loads.End() }()
		start = time.Now()
		if err := c.take(t.Context(), partBytes); err != nil || time.Since(start) != time.Millisecond {
			t.Errorf("%v after %s, the load had ended after 1ms", err, time.Since(start))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.take(ctx, partBytes); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
