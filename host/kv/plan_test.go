package kv

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// tiles cuts every plane's (block, byte) grid into random rectangles and shuffles them: any such list is a plan.
func tiles(r *rand.Rand, g Geometry) []Segment {
	var out []Segment
	var cut func(s Segment, depth int)
	cut = func(s Segment, depth int) {
		switch {
		case depth > 0 && s.Blocks > 1 && r.IntN(2) == 0:
			n := 1 + r.Uint32N(s.Blocks-1)
			a, b := s, s
			a.Blocks, b.Block, b.Blocks = n, s.Block+n, s.Blocks-n
			cut(a, depth-1)
			cut(b, depth-1)
		case depth > 0 && s.PageLen > 1 && r.IntN(2) == 0:
			n := 1 + r.Uint32N(s.PageLen-1)
			a, b := s, s
			a.PageLen, b.PageOff, b.PageLen = n, s.PageOff+n, s.PageLen-n
			cut(a, depth-1)
			cut(b, depth-1)
		default:
			if r.IntN(3) == 0 {
				s.Gap = r.Uint32N(4096)
			}
			out = append(out, s)
		}
	}
	for i, p := range g.Planes {
		cut(Segment{Plane: uint32(i), Blocks: g.Blocks, PageLen: p.PageBytes}, 4)
	}
	r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	gaps := max(g.PageBytes(), MinGaps)
	for i := range out {
		out[i].Gap = uint32(min(int64(out[i].Gap), gaps))
		gaps -= int64(out[i].Gap)
	}
	return out
}

func randomGeometry(r *rand.Rand) Geometry {
	g := Geometry{Blocks: 1 + r.Uint32N(9)}
	for l := range 1 + r.Uint32N(4) {
		for part := range 1 + r.Uint32N(2) {
			g.Planes = append(g.Planes, Plane{Layer: l, Part: part, PageBytes: 1 + r.Uint32N(40000)})
		}
	}
	return g
}

// The spans of any accepted plan visit each byte of each page once, in payload order, within extents of at most 64 KiB
// that restart at every segment.
func TestSpansCoverEveryPageByteOnce(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		g := randomGeometry(r)
		p, err := NewPlan(g, tiles(r, g))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		seen := make([][]byte, len(g.Planes))
		for i, pl := range g.Planes {
			seen[i] = make([]byte, int(g.Blocks)*int(pl.PageBytes))
		}
		var at int64
		join := 1 + r.Uint32N(3)
		for c := p.Spans(0, len(p.Extents()), join); c.Next(); {
			e := p.Extents()[c.Extent()]
			s := c.Span
			if s.Off < at || s.Off < e.Off || s.Off+int64(s.Len) > e.Off+int64(e.Len) {
				t.Fatalf("seed %d: span %+v after byte %d in extent %+v", seed, s, at, e)
			}
			at = s.Off + int64(s.Len)
			if page := g.Planes[s.Plane].PageBytes; s.Block/join != (s.Block*page+s.PageOff+s.Len-1)/page/join {
				t.Fatalf("seed %d: span %+v is of more than %d blocks", seed, s, join)
			}
			for b := range s.Len {
				seen[s.Plane][s.Block*g.Planes[s.Plane].PageBytes+s.PageOff+b]++
			}
		}
		if at != p.PayloadBytes() {
			t.Fatalf("seed %d: spans end at %d, the payload at %d", seed, at, p.PayloadBytes())
		}
		for i := range seen {
			for b, n := range seen[i] {
				if n != 1 {
					t.Fatalf("seed %d: plane %d byte %d visited %d times", seed, i, b, n)
				}
			}
		}
		for i := range p.Segments() {
			lo, hi := p.SegmentExtents(i)
			for _, e := range p.Extents()[lo:hi] {
				if e.Len > ExtentBytes || int(e.Segment) != i {
					t.Fatalf("seed %d: extent %+v of segment %d", seed, e, i)
				}
			}
		}
		again, err := DecodePlan(p.Encoded())
		if err != nil || again.Digest() != p.Digest() || !bytes.Equal(again.Encoded(), p.Encoded()) {
			t.Fatalf("seed %d: decoding gave %v", seed, err)
		}
	}
}

func TestPlanRefusals(t *testing.T) {
	g := Uniform(4, 1, 1, 100)
	whole := Segment{Blocks: 4, PageLen: 100}
	for name, segments := range map[string][]Segment{
		"nothing":             nil,
		"a byte missing":      {{Blocks: 4, PageLen: 99}},
		"a block missing":     {{Blocks: 3, PageLen: 100}},
		"everything twice":    {whole, whole},
		"one byte twice":      {{Blocks: 4, PageLen: 50}, {Blocks: 4, PageOff: 49, PageLen: 50}},
		"a hole and a double": {{Blocks: 2, PageLen: 100}, {Block: 1, Blocks: 2, PageLen: 100}},
		"page overflow":       {{Blocks: 4, PageLen: 101}},
		"page offset wraps":   {{Blocks: 4, PageOff: 0xffffffff, PageLen: 2}},
		"block overflow":      {{Block: 1, Blocks: 4, PageLen: 100}},
		"block wraps":         {{Block: 0xffffffff, Blocks: 2, PageLen: 100}},
		"unknown plane":       {{Plane: 1, Blocks: 4, PageLen: 100}},
		"empty segment":       {whole, {Blocks: 0, PageLen: 100}},
		"large gap":           {{Blocks: 4, PageLen: 100, Gap: 4096}},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := NewPlan(g, segments); !errors.Is(err, ErrPlan) {
				t.Errorf("making the plan: got %v, want %v", err, ErrPlan)
			}
		})
	}
}

func TestExtentChecksums(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 3))
	g := randomGeometry(r)
	p, err := NewPlan(g, tiles(r, g))
	testenv.OK(t, err)
	payload := make([]byte, p.PayloadBytes())
	for i := range payload {
		payload[i] = byte(r.Uint32())
	}
	n := len(p.Extents())
	table := make([]uint64, n)
	SumExtents(p, 0, n, payload, 0, table)
	testenv.OK(t, VerifyExtents(p, 0, n, payload, 0, table))
	for x, e := range p.Extents() {
		at := e.Off + r.Int64N(int64(e.Len))
		payload[at] ^= 1 << r.UintN(8)
		if err := VerifyExtents(p, x, x+1, payload[e.Off:], e.Off, table); !errors.Is(err, ErrChecksum) {
			t.Errorf("extent %d: a flipped bit went unnoticed: %v", x, err)
		}
		payload[at] = ^payload[at]
		SumExtents(p, x, x+1, payload, 0, table)
	}
}

func FuzzDecodePlan(f *testing.F) {
	for seed := range uint64(4) {
		r := rand.New(rand.NewPCG(seed, 4))
		g := randomGeometry(r)
		p, err := NewPlan(g, tiles(r, g))
		testenv.OK(f, err)
		f.Add(p.Encoded())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := DecodePlan(b)
		if err != nil {
			if !errors.Is(err, ErrPlan) && !errors.Is(err, ErrGeometry) {
				t.Fatalf("unnamed error %v", err)
			}
			return
		}
		if !bytes.Equal(p.Encoded(), b) {
			t.Fatal("a plan has two encodings")
		}
	})
}

// Gaps of less than 4 KiB each must not make a small piece a large file.
func TestGapsAreBounded(t *testing.T) {
	for _, c := range []struct {
		pageBytes uint32
		blocks    uint32
		gaps      int64
		ok        bool
	}{
		{1, 1 << 12, 64 << 10, true}, {1, 1 << 12, 64<<10 + 1, false}, {1 << 10, 1 << 12, 4 << 20, true}, {1 << 10, 1 << 12, 4<<20 + 1, false},
	} {
		left := c.gaps
		var segments []Segment
		for block := range c.blocks {
			gap := min(left, 4095)
			left -= gap
			segments = append(segments, Segment{Block: block, Blocks: 1, PageLen: c.pageBytes, Gap: uint32(gap)})
		}
		p, err := NewPlan(Uniform(c.blocks, 1, 1, c.pageBytes), segments)
		if left != 0 || (err == nil) != c.ok || err != nil && !errors.Is(err, ErrPlan) {
			t.Errorf("%d blocks of %d bytes with %d bytes of gaps: %v, %v", c.blocks, c.pageBytes, c.gaps, p != nil, err)
		}
	}
}

// FuzzParseNamespace: what is read of a namespace's text has the same text.
func FuzzParseNamespace(f *testing.F) {
	n := Namespace{
		Model: "m", DType: "auto/bfloat16", Engine: "e", HashAlgorithm: "sha256", HashSeed: "a=b", KeyBytes: 32, TokensPerBlock: 16, TensorParallel: 2,
		Replicated: true, Groups: []Group{{ID: 3, Geometry: Uniform(2, 2, 2, 4096)}, {ID: 12, Lookup: ByMembership, Geometry: Uniform(1, 1, 1, 7)}},
		Extra: map[string]string{"a.b": "c=d", "e": ""},
	}
	f.Add(n.Text())
	shared := n
	shared.Replicated, shared.Units = false, 4
	f.Add(shared.Text())
	f.Add("group.0=prefix blocks=1 planes=")
	f.Fuzz(func(t *testing.T, text string) {
		switch got, err := ParseNamespace(text); {
		case err != nil && text == n.Text():
			t.Fatal(err)
		case err == nil && got.Text() != text:
			t.Errorf("%q of %q", got.Text(), text)
		case err == nil && text == n.Text() && (got.Groups[0].ID != 12 || got.Groups[0].Lookup != ByMembership || len(got.Groups[1].Geometry.Planes) != 4):
			t.Errorf("groups %+v", got.Groups)
		}
	})
}
