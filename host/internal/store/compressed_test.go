package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/testkit/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// compressing is a fixture whose chunks are large enough to be compressed: 3 extents of 64 KiB in each of 2 layers.
func compressing(t testing.TB, dir string, change ...func(*Config)) *fixture {
	t.Helper()
	f := &fixture{TB: t, ns: testNamespace(1)}
	f.ns.DType = "bf16"
	f.ns.Groups[0].Geometry = kv.Uniform(3, 2, 1, kv.ExtentBytes)
	f.cfg = Config{
		Roots: []RootConfig{{Path: dir, Capacity: 64 << 20, MaxEntries: 64, Compressed: true}}, Now: fakeClock(),
		HostID: "testhost",
	}
	for _, c := range change {
		c(&f.cfg)
	}
	f.start()
	return f
}

// storeHalf stores a piece of which every second extent is one repeated byte.
func (f *fixture) storeHalf(n uint64) error { return f.storeHalfOf(n, 0) }

func (f *fixture) storeHalfOf(n uint64, rank uint32) error {
	p, err := f.store.Put(context.Background(), f.request(n, n, rank))
	if err != nil {
		return err
	}
	pool, err := staging.NewSlots(1, int(p.FileBytes()))
	if err != nil {
		return err
	}
	defer pool.Close()
	return storetest.StorePut(context.Background(), pool, p, half(p.Plan(), p.q.Key, rank))
}

// half is a payload of which every second extent is one repeated byte.
func half(plan *kv.Plan, key kv.Key, rank uint32) []byte {
	data := payload(plan, key, rank)
	for i, e := range plan.Extents() {
		if i%2 == 1 {
			for j := range e.Len {
				data[e.Off+int64(j)] = byte(i)
			}
		}
	}
	return data
}

// TestCompressedPiecesAreBookedAsTheyAre stores pieces that take half of what was reserved for them. The account has what the
// files take, at once, after a checkpoint and after a scan, with compression on and off.
func TestCompressedPiecesAreBookedAsTheyAre(t *testing.T) {
	f := compressing(t, t.TempDir())
	const stored = 3*kv.ExtentBytes + 3*8
	want := 2*pieceformat.Page + pieceformat.Padded(stored)
	for n := range uint64(3) {
		must(t, f.storeHalf(n))
	}
	check := func(when string) {
		t.Helper()
		bytes, temps := usage(t, f.cfg.Roots[0].Path)
		equal(t, when+": bytes in files", bytes, 3*want)
		equal(t, when+": bytes in the account", f.store.Stats().Roots[0].Used, 3*want)
		equal(t, when+": temporaries", temps, 0)
		l := f.lookup(0, 1, 2)
		defer l.Release()
		equal(t, when+": hits", l.Hits(), 3)
		p, err := l.Open(1, 0)
		must(t, err)
		defer p.Close()
		expected := p.Expected()
		image := make([]byte, p.Size())
		if _, err := p.File().ReadAt(image, 0); err != nil {
			t.Fatal(err)
		}
		head, err := p.Verify(image)
		must(t, err)
		if !head.Compressed || !expected.Compressed || head.DataOffset != expected.DataOffset || len(head.Offsets) != 7 ||
			head.Offsets[6] != stored || head.Stored[1].Codec != uint8(codec.Planes) || head.Stored[2].Codec != uint8(codec.Raw) {
			t.Errorf("%s: head %+v, want that of a compressed piece of %d bytes at %d", when, head, stored, expected.DataOffset)
		}
	}
	check("stored")
	f.restart()
	check("after a checkpoint")
	must(t, f.store.Close())
	must(t, os.Remove(f.cfg.Roots[0].Path+"/"+pieceformat.CheckpointFile))
	f.start()
	check("after a scan")
	f.cfg.Roots[0].Compressed = false
	f.restart()
	check("with compression off")
}

// TestHostsShareCompressedPieces fills a shared root by two hosts with pieces of half their size: the credit that a put took
// for a whole one returns, so that more fit than there would be plain ones. Each host, and a third that does not compress,
// counts and reads them.
func TestHostsShareCompressedPieces(t *testing.T) {
	dir := t.TempDir()
	host := func(id string, compresses bool) *fixture {
		return compressing(t, dir, func(c *Config) {
			c.HostID, c.Now = id, time.Now
			r := &c.Roots[0]
			r.Capacity, r.Compressed = 16*(6*kv.ExtentBytes+2*pieceformat.Page), compresses
			r.Shared, r.Poll, r.Lapse = true, 5*time.Millisecond, time.Hour
		})
	}
	hosts := []*fixture{host("a", true), host("b", true), host("c", false)}
	const pieces = 20
	for n := range uint64(pieces) {
		must(t, hosts[n%2].storeHalf(n))
	}
	want := pieces * (2*pieceformat.Page + pieceformat.Padded(3*kv.ExtentBytes+3*8))
	for _, f := range hosts {
		id := f.cfg.HostID
		await(t, id+" knows all pieces", func() bool { return f.store.Stats().Roots[0].Used == want })
		for n := range uint64(pieces) {
			l := f.lookup(n)
			equal(t, fmt.Sprintf("hits of %d by %s", n, id), l.Hits(), 1)
			p, err := l.Open(0, 0)
			must(t, err)
			image := make([]byte, p.Size())
			_, err = p.File().ReadAt(image, 0)
			must(t, err)
			if head, err := p.Verify(image); err != nil || !head.Compressed {
				t.Errorf("%s reads %d: head %+v, %v, want that of a compressed piece", id, n, head, err)
			}
			p.Close()
			l.Release()
		}
	}
	equal(t, "bytes on the disk", onDisk(t, dir), want)
}

// TestPutSaysWhatItWrites compares puts with and without compression.
func TestPutSaysWhatItWrites(t *testing.T) {
	f := compressing(t, t.TempDir())
	put := func(group uint32) *Put {
		q := f.request(1, 1, 0)
		q.Group = group
		p, err := f.store.Put(t.Context(), q)
		must(t, err)
		return p
	}
	p := put(0)
	plan := p.Plan()
	if !p.Compresses() || p.Element() != 2 || p.DataOffset() != pieceformat.DataOffset(6, true) ||
		p.FileBytes() != pieceformat.MostBytes(plan) {
		t.Errorf("compresses %t, elements of %d bytes, data at %d, %d bytes", p.Compresses(), p.Element(), p.DataOffset(), p.FileBytes())
	}
	f2, err := p.File()
	must(t, err)
	if _, err := f2.WriteAt(make([]byte, 4*pieceformat.Page), 0); err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context()); !errors.Is(err, ErrShort) {
		t.Errorf("a piece without a head was published: %v", err)
	}
	small := put(1)
	defer small.Abort(nil)
	if small.Compresses() || small.FileBytes() != pieceformat.FileBytes(small.Plan()) {
		t.Errorf("a payload of %d bytes is compressed", small.Plan().PayloadBytes())
	}
	equal(t, "in use after all", f.store.Stats().Roots[0].Used, pieceformat.MostBytes(small.Plan()))
}

// TestPoliciesHearStoredSizes: INSERT has the size that was reserved, and the UNPIN that ends the writing what it takes.
func TestPoliciesHearStoredSizes(t *testing.T) {
	w := &witness{}
	f := compressing(t, t.TempDir(), func(c *Config) { c.Policies.Evict = handle(w.module()) })
	must(t, f.storeHalf(0))
	r := f.root()
	r.Lock()
	err := r.Evictor.Flush()
	r.Unlock()
	must(t, err)
	size := map[abi.Op]int64{}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, ev := range w.events {
		size[ev.Op] = int64(ev.Size) * abi.SizeUnit
	}
	equal(t, "size of INSERT", size[abi.OpInsert], pieceformat.MostBytes(f.space.Plan(0)))
	equal(t, "size of UNPIN", size[abi.OpUnpin], f.store.Stats().Roots[0].Used)
}

// TestDailyWritesAreWhatIsWritten: the daily budget counts what compressed pieces take.
func TestDailyWritesAreWhatIsWritten(t *testing.T) {
	f := compressing(t, t.TempDir(), func(c *Config) { c.Roots[0].DailyWrites = 1 << 40 })
	for n := range uint64(2) {
		must(t, f.storeHalf(n))
	}
	r := f.root()
	equal(t, "bytes written today", r.budget.Spent(), r.Account.Figures().Used)
}

// TestWhatDoesNotGainIsStoredPlain: a namespace whose pieces gain nothing gets no more of them compressed, but for one from
// time to time, beside another namespace that gains. Both are readable.
func TestWhatDoesNotGainIsStoredPlain(t *testing.T) {
	f := compressing(t, t.TempDir(), func(c *Config) { c.Roots[0].MaxEntries = 1024 })
	const extent, gains, pieces = 16 << 10, 10, codec.Trial + 10
	random := *f.ns
	random.Model, random.Groups = "random", []kv.Group{{Geometry: kv.Uniform(1, 2, 1, extent)}}
	half := random
	half.Model = "half"
	f.ns = &half
	f.restart()
	for n := range uint64(gains) {
		must(t, f.storeHalf(n))
	}
	var err error
	f.space, err = f.store.Namespace(t.Context(), &random)
	must(t, err)
	compressed := 0
	for n := range uint64(pieces) {
		p, err := f.store.Put(t.Context(), f.request(n, n, 0))
		must(t, err)
		if p.Compresses() {
			compressed++
		} else if p.FileBytes() != pieceformat.FileBytes(p.Plan()) {
			t.Fatalf("a file of %d bytes, plain it has %d", p.FileBytes(), pieceformat.FileBytes(p.Plan()))
		}
		must(t, write(p))
		must(t, p.Publish(t.Context()))
	}
	if compressed != 4 {
		t.Errorf("%d of %d pieces that gain nothing were compressed, want the first and three trials", compressed, pieces)
	}
	l := f.lookup(0, 1, pieces-1)
	defer l.Release()
	equal(t, "hits of what gains nothing", l.Hits(), 3)
	for i := range l.Hits() {
		if _, err := read(l, i, 0); err != nil {
			t.Error(err)
		}
	}
	equal(t, "models", len(f.store.Compression()), 2)
	for _, m := range f.store.Compression() {
		want := codec.Figures{Model: "half", Encoded: codec.Flow{Pages: gains * 2 * extent, Stored: gains * (extent + 8)}}
		if m.Model == "random" {
			want = codec.Figures{Model: "random", Encoded: codec.Flow{Pages: 8 * extent, Stored: 8 * extent},
				Plain: (pieces - 4) * 2 * extent}
		}
		equal(t, "figures", m, want)
	}
}

// TestDamageAtAStartCostsNoOtherEntry: the scan of a full root finds a damaged file. What its entry then lacks is reserved
// at the size of a piece that cannot be compressed, and the damaged file is kept. Neither is at the cost of another entry.
func TestDamageAtAStartCostsNoOtherEntry(t *testing.T) {
	for _, compressed := range []bool{false, true} {
		t.Run(fmt.Sprintf("compressed=%t", compressed), func(t *testing.T) {
			f := compressing(t, t.TempDir(), func(c *Config) { c.Roots[0].Compressed = compressed })
			f.ns.TensorParallel = 2
			f.restart()
			for n := range uint64(4) {
				f.must(f.storeHalfOf(n, 0))
				f.must(f.storeHalfOf(n, 1))
			}
			f.cfg.Roots[0].Capacity = f.store.Stats().Roots[0].Used
			f.must(os.Truncate(f.pieceFile(3, 1), 2*pieceformat.Page))
			f.crash()
			for n := range uint64(4) {
				equal(t, fmt.Sprintf("key %d is a hit", n), f.has(n), n != 3)
			}
			equal(t, "Evictions", f.store.Stats().Roots[0].Evictions, 0)
			if st := f.store.Stats().Roots[0]; st.Used > st.Capacity {
				t.Errorf("%d bytes used of %d", st.Used, st.Capacity)
			}
		})
	}
}

// TestCompressedPiecesAreCopied: a level gets compressed pieces as they are, one in memory that holds plain ones gets their pages.
func TestCompressedPiecesAreCopied(t *testing.T) {
	for _, to := range []RootConfig{
		{}, {Shared: true, Poll: 5 * time.Millisecond, Lapse: time.Hour}, {Medium: volatile}, {Medium: volatile, Compressed: true},
	} {
		decoded := to.Volatile && !to.Compressed
		to.Path, to.Capacity, to.MaxEntries, to.Level = t.TempDir(), 64<<20, 64, 1
		f := compressing(t, t.TempDir(), func(c *Config) {
			c.Now, c.Roots[0].Write = time.Now, WriteThrough
			c.Roots = append(c.Roots, to)
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
			equal(t, "a copy is compressed", head.Compressed, !decoded)
			noError(t, head.Verify(0, len(head.Table), image, 0))
			if want := pieceformat.FileBytes(head.Plan); decoded != (p.Size() == want) {
				t.Errorf("%+v: a copy of %d bytes, without compression it has %d", to, p.Size(), want)
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
	t.Parallel() // it waits more than it works
	const plainBytes, stored = 2*pieceformat.Page + 6*kv.ExtentBytes, 3*kv.ExtentBytes + 3*8
	for _, kind := range []moves.Kind{moves.Through, moves.Demotion} {
		t.Run(kind.String(), func(t *testing.T) {
			near := t.TempDir()
			f := compressing(t, t.TempDir(), func(c *Config) {
				c.Roots[0].Level = 1
				memory := RootConfig{Path: near, Capacity: 4 * plainBytes, MaxEntries: 64, Medium: volatile}
				if kind == moves.Through {
					memory.Write = WriteThrough
				}
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

// TestAPieceInTwoSizes: a scan finds a piece twice, under a place policy's name and the built-in one, or another
// policy's, and one of its files is compressed. One file stays, and the account has what it takes.
func TestAPieceInTwoSizes(t *testing.T) {
	testenv.Slow(t)
	for _, compressed := range []bool{false, true} { // the file under the place policy's name
		for _, other := range []string{"built-in", "earlier"} {
			for _, back := range []bool{false, true} {
				t.Run(fmt.Sprintf("compressed=%t/%s/back=%t", compressed, other, back), func(t *testing.T) {
					// file is the piece as a store writes it, and its name below the root.
					file := func(w string, compressed bool) (rel string, b []byte) {
						f := compressing(t, t.TempDir(), inOrder(back), func(c *Config) {
							c.Roots[0].Compressed = compressed
							if w != "" {
								c.Policies.Place = widths(t, w)
							}
						})
						f.ns.TensorParallel = 2
						f.restart()
						f.must(f.storeHalf(0))
						name := f.pieceFile(0, 0)
						b, err := os.ReadFile(name)
						f.must(err)
						rel, err = filepath.Rel(f.cfg.Roots[0].Path, name)
						f.must(err)
						return rel, b
					}
					now, kept := file("1/1/1", compressed)
					before, second := file(map[string]string{"built-in": "", "earlier": "2/2"}[other], !compressed)
					if now == before || len(kept) == len(second) {
						t.Fatal(now, before, len(kept), len(second))
					}
					f := compressing(t, t.TempDir(), inOrder(back), func(c *Config) {
						if other == "earlier" {
							c.Policies.Place = widths(t, "2/2")
						}
					})
					f.ns.TensorParallel = 2
					f.restart()
					f.must(f.storeHalfOf(1, 0)) // so that there is an earlier policy with files
					f.must(f.storeHalfOf(1, 1))
					f.cfg.Policies.Place = widths(t, "1/1/1")
					f.restart()
					f.must(f.storeHalfOf(0, 1)) // of one size
					f.must(f.store.Close())
					root := f.cfg.Roots[0].Path
					f.must(os.Remove(filepath.Join(root, pieceformat.CheckpointFile)))
					put(t, filepath.Join(root, now), kept)
					put(t, filepath.Join(root, before), second)
					f.start()
					<-f.store.ScanDone()
					bytes, temps := usage(t, root)
					equal(t, "bytes in the account", f.store.Stats().Roots[0].Used, bytes)
					equal(t, "temporaries", temps, 0)
					equal(t, "files", len(f.files()), 4)
					for n := range uint64(2) {
						f.readHalf(n)
					}
					f.drop(0)
					f.drop(1)
					equal(t, "bytes in the account of an empty root", f.store.Stats().Roots[0].Used, 0)
					bytes, _ = usage(t, root)
					equal(t, "bytes in files of an empty root", bytes, 0)
				})
			}
		}
	}
}

// TestStoredAgainInAnotherSize: a piece could not be unlinked and is stored again, compressed now or not any more. The account
// has what its file takes, whichever of the two that is.
func TestStoredAgainInAnotherSize(t *testing.T) {
	for _, compressed := range []bool{false, true} {
		t.Run(fmt.Sprintf("compressed=%t", compressed), func(t *testing.T) {
			faulty := faultfs.New(staging.OS())
			f := compressing(t, t.TempDir(), func(c *Config) { c.FS, c.Roots[0].Compressed = faulty, !compressed })
			r := f.root()
			f.must(f.storeHalf(0))
			check := func(when string, files int64) {
				t.Helper()
				bytes, temps := usage(t, r.Path)
				equal(t, when+": bytes in the account", f.store.Stats().Roots[0].Used, bytes)
				equal(t, when+": temporaries", temps, 0)
				equal(t, when+": files", int64(len(f.files())), files)
			}
			faulty.Set(faultfs.MustRules("remove ** : eio")...)
			r.drop(f.markOf(0))
			faulty.Set()
			check("it is not unlinked", 1)
			r.cfg.Compressed = compressed
			f.must(f.storeHalf(0))
			check("it is stored again", 1)
			f.maintain(RetryRemovals)
			check("tried again", 1)
			f.readHalf(0)
			equal(t, "Orphaned", f.store.Stats().Roots[0].Orphaned, 0)
			r.drop(f.markOf(0))
			check("it goes", 0)
		})
	}
}

// TestCopyIsOneRunOfMemory: a piece that is copied to memory lies there as one that was stored there does, in one run: a GPU takes each run
// by itself. So it is with what is copied as it is, decoded or compressed on the way, and with several copies at a time.
func TestCopyIsOneRunOfMemory(t *testing.T) {
	for _, c := range []struct {
		name                      string
		farCompressed, compressed bool
	}{{"as it is", false, false}, {"decoded", true, false}, {"compressed on the way", false, true}, {"compressed as it is", true, true}} {
		t.Run(c.name, func(t *testing.T) {
			memory, err := memfs.New(16<<20, slog.New(slog.DiscardHandler))
			must(t, err)
			t.Cleanup(func() { memory.Close() })
			f := compressing(t, t.TempDir(), func(cfg *Config) {
				far := cfg.Roots[0]
				far.Level, far.Compressed = 1, c.farCompressed
				cfg.Roots = []RootConfig{{
					Path: "memory:", Medium: Medium{FS: memory, Traits: Memory}, ForPieces: true, Capacity: 16 << 20, MaxEntries: 64, Compressed: c.compressed,
				}, far}
			})
			f.takeOut(0)
			for n := range uint64(4) {
				must(t, f.storeHalf(n))
			}
			must(t, f.store.Maintain(t.Context(), 0, Probe))
			l := f.lookup(upTo(4)...)
			l.Release()
			f.settle()
			for n := range uint64(4) {
				head, root := f.readHalf(n)
				equal(t, "root of a copy", root, "memory:")
				equal(t, "a copy is compressed", head.Compressed, c.compressed)
				l := f.lookup(n)
				p, err := l.Open(0, 0)
				must(t, err)
				runs, err := staging.MemoryOf(p.File(), p.Size())
				must(t, err)
				equal(t, "runs of memory", len(runs), 1)
				p.Close()
				l.Release()
			}
			f.settle()
			bytes := int64(0)
			must(t, staging.Walk(t.Context(), memory, "memory:", "none", 1, func(rel string, _ fs.DirEntry) {
				info, err := memory.Stat("memory:/" + rel)
				must(t, err)
				bytes += info.Allocated
			}, func(string, error) {}))
			equal(t, "bytes in the account of memory", f.store.Stats().Roots[0].Used, bytes)
		})
	}
}
