package store

import (
	"bytes"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// TestCompressedPiecesAreCopied: a level on a disk gets compressed pieces as they are, one in memory gets their pages.
func TestCompressedPiecesAreCopied(t *testing.T) {
	for _, volatile := range []bool{false, true} {
		far := t.TempDir()
		f := compressing(t, t.TempDir(), func(c *Config) {
			c.Roots[0].Through = true
			c.Roots = append(c.Roots, RootConfig{Path: far, Capacity: 64 << 20, MaxEntries: 64, Level: 1, Volatile: volatile})
		})
		for n := range uint64(3) {
			must(t, f.storeHalf(n))
		}
		f.settle()
		for i, r := range f.store.Stats().Roots {
			bytes, temps := usage(t, f.cfg.Roots[i].Path)
			equal(t, "bytes in the account of a level", r.Used, bytes)
			equal(t, "temporaries", temps, 0)
		}
		f.takeOut(0)
		for n := range uint64(3) {
			l := f.lookup(n)
			defer l.Release()
			equal(t, "hits of a copy", l.Hits(), 1)
			p, err := l.Open(0, 0)
			must(t, err)
			defer p.Close()
			image := make([]byte, p.Size())
			if _, err := p.File().ReadAt(image, 0); err != nil {
				t.Fatal(err)
			}
			head, err := p.Verify(image)
			must(t, err)
			equal(t, "a copy is compressed", head.Compressed, !volatile)
			noError(t, head.Verify(0, len(head.Table), image, 0))
			if want := pieceformat.FileBytes(head.Plan); volatile != (p.Size() == want) {
				t.Errorf("volatile %t: a copy of %d bytes, without compression it has %d", volatile, p.Size(), want)
			}
		}
	}
}

// readHalf reads a piece that storeHalf has stored, in whatever version it is, and says in which root it is.
func (f *fixture) readHalf(n uint64) (head *Head, root string) {
	f.Helper()
	l := f.lookup(n)
	defer l.Release()
	equal(f, "hits", l.Hits(), 1)
	p, err := l.Open(0, 0)
	f.must(err)
	defer p.Close()
	image := make([]byte, p.Size())
	if _, err := p.File().ReadAt(image, 0); err != nil {
		f.Fatal(err)
	}
	head, err = p.Verify(image)
	f.must(err)
	extents := head.Plan.Extents()
	f.must(head.Verify(0, len(extents), image, 0))
	want := half(head.Plan, testKey(n), 0)
	for i, e := range extents {
		from, to := head.At(i)
		page := image[from:to]
		if head.Compressed {
			page = make([]byte, e.Len)
			f.must(head.Decode(i, page, image[from:to]))
		}
		if !bytes.Equal(page, want[e.Off:][:e.Len]) {
			f.Fatalf("extent %d of key %d differs in %s", i, n, p.Root())
		}
	}
	copied := *head
	return &copied, p.Root()
}

// TestPlainPiecesAreCompressedOnTheWay: what leaves a root in memory, or is written through it, is compressed in a root that
// compresses, and comes nearer as it was. Each account has what the files take, and the figures what the codec gained.
func TestPlainPiecesAreCompressedOnTheWay(t *testing.T) {
	const plainBytes, stored = 2*pieceformat.Page + 6*kv.ExtentBytes, 3*kv.ExtentBytes + 3*8
	for _, kind := range []moves.Kind{moves.Through, moves.Demotion} {
		t.Run(kind.String(), func(t *testing.T) {
			near := t.TempDir()
			f := compressing(t, t.TempDir(), func(c *Config) {
				c.Roots[0].Level = 1
				memory := RootConfig{Path: near, Capacity: 4 * plainBytes, MaxEntries: 64, Volatile: true, Through: kind == moves.Through}
				c.Roots = append([]RootConfig{memory}, c.Roots...)
			})
			const n = 12
			check := func() {
				t.Helper()
				for i, r := range f.store.Stats().Roots {
					bytes, temps := usage(t, f.cfg.Roots[i].Path)
					equal(t, "bytes in the account of "+r.Path, r.Used, bytes)
					equal(t, "temporaries", temps, 0)
				}
			}
			for i := range uint64(n) {
				f.must(f.storeHalf(i))
				f.lookup(i).Release() // what nobody asked for is not demoted
				f.settle()
				check()
			}
			copies := f.moved(1, kind).Done.Load()
			if copies < n/2 {
				t.Fatalf("%d copies of %d", copies, n)
			}
			far := f.store.Stats().Roots[1]
			equal(t, "bytes in the far root", far.Used, int64(far.Entries)*(2*pieceformat.Page+pieceformat.Padded(stored)))
			encoded := f.store.Compression()[0].Encoded
			equal(t, "pages that were encoded", encoded.Pages, int64(copies)*6*kv.ExtentBytes)
			equal(t, "what is stored of them", encoded.Stored, int64(copies)*stored)
			nearer := 0
			for i := range uint64(n) {
				if !f.has(i) {
					continue
				}
				for range 3 { // after its second load it is in memory
					head, root := f.readHalf(i)
					equal(t, "compressed in "+root, head.Compressed, root != near)
					f.settle()
					check()
				}
				if _, root := f.readHalf(i); root == near {
					nearer++
				}
			}
			promoted := f.moved(0, moves.Promotion).Done.Load()
			if promoted == 0 || nearer < n/2 {
				t.Errorf("%d of %d entries came nearer", nearer, n)
			}
			equal(t, "pages that were decoded", f.store.Compression()[0].Decoded.Pages, int64(promoted)*6*kv.ExtentBytes)
			equal(t, "damaged", f.store.Stats().Roots[1].Damaged, 0)
		})
	}
}
