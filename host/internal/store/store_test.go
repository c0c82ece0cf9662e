package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// testNamespace has small chunks: 2 blocks, 2 layers, K and V, pages of 1,000 bytes.
func testNamespace(ranks int) *kv.Namespace {
	return &kv.Namespace{
		Model: "test/model", Revision: "1", DType: "fp8", Engine: "test", HashAlgorithm: "sha256", KeyBytes: 32,
		TokensPerBlock: 16, TensorParallel: ranks,
		Groups: []kv.Group{
			{ID: 0, Lookup: kv.ByPrefix, Geometry: kv.Uniform(2, 2, 2, 1000)},
			{ID: 1, Lookup: kv.ByMembership, Geometry: kv.Uniform(1, 1, 2, 5000)},
		},
	}
}

// testKey is the n-th key: spread like a hash, the same in every run.
func testKey(n uint64) (k kv.Key) {
	r := rand.New(rand.NewPCG(n, 7))
	for i := 0; i < len(k); i += 8 {
		binary.LittleEndian.PutUint64(k[i:], r.Uint64())
	}
	return k
}

// equal compares a figure with what it should be.
func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

type fixture struct {
	testing.TB
	cfg   Config
	store *Store
	space *catalog.Namespace
	ns    *kv.Namespace
}

// open starts a store with room for so many entries of group 0.
func newFixture(t testing.TB, dir string, entries int, ranks int, change ...func(*Config)) *fixture {
	t.Helper()
	f := &fixture{TB: t, ns: testNamespace(ranks)}
	f.cfg = Config{
		Roots: []RootConfig{
			{Path: dir, Capacity: int64(entries) * int64(ranks) * pieceBytes, MaxEntries: uint32(entries) * 8},
		}, Now: fakeClock(), HostID: "testhost", Log: slog.New(slog.DiscardHandler),
	}
	for _, c := range change {
		c(&f.cfg)
	}
	f.start()
	return f
}

// pieceBytes is the file size of a piece of group 0: header, table, and 8,000 bytes of payload.
const pieceBytes = 4 * pieceformat.Page

func (f *fixture) start() {
	f.Helper()
	f.open()
	<-f.store.ScanDone()
}

// open does not wait for the scan.
func (f *fixture) open() {
	f.Helper()
	s, err := Open(context.Background(), f.cfg)
	must(f, err)
	f.store = s
	f.Cleanup(func() { s.Close() })
	if f.space, err = s.Namespace(context.Background(), f.ns); err != nil {
		f.Fatal(err)
	}
}

func (f *fixture) restart() {
	f.Helper()
	must(f, f.store.Close())
	f.start()
}

// fakeClock moves by a millisecond each time it is asked.
func fakeClock() func() time.Time {
	start := time.Unix(1_700_000_000, 0)
	var n atomic.Int64
	return func() time.Time { return start.Add(time.Duration(n.Add(1)) * time.Millisecond) }
}

// payload is a piece's content, derived from its identity.
func payload(plan *kv.Plan, k kv.Key, rank uint32) []byte {
	b := make([]byte, pieceformat.Padded(plan.PayloadBytes()))
	r := rand.New(rand.NewPCG(binary.LittleEndian.Uint64(k[:]), uint64(rank)))
	for i := range b[:plan.PayloadBytes()] {
		b[i] = byte(r.Uint32())
	}
	return b
}

// write fills a put's file.
func write(p *Put) error {
	pool, err := staging.NewSlots(1, int(p.FileBytes()))
	if err != nil {
		return err
	}
	defer pool.Close()
	return storetest.Write(context.Background(), pool, p, payload(p.Plan(), p.key, p.rank))
}

// put stores one piece of key n in group 0, child of key n-1 unless it is 0.
func (f *fixture) put(n uint64, rank uint32) error { return f.putUnder(n, n-1, rank) }

func (f *fixture) request(n, parent uint64, rank uint32) PutRequest {
	q := PutRequest{Namespace: f.space, Key: testKey(n), Depth: uint32(n), Rank: rank, Request: 1}
	if n != 0 && n != parent {
		q.Parent = testKey(parent)
	}
	return q
}

func (f *fixture) putUnder(n, parent uint64, rank uint32) error {
	p, err := f.store.Put(context.Background(), f.request(n, parent, rank))
	if err != nil {
		return err
	}
	if err := write(p); err != nil {
		p.Abort(err)
		return err
	}
	return p.Publish(context.Background())
}

func (f *fixture) mustPut(ns ...uint64) {
	f.Helper()
	for _, n := range ns {
		for rank := range uint32(f.ns.Ranks()) {
			err := f.put(n, rank)
			if errors.Is(err, ErrNoSpace) && f.cfg.Roots[0].Shared { // on a busy machine the evictor's credit can be late
				await(f, fmt.Sprintf("credit for key %d rank %d", n, rank), func() bool {
					err = f.put(n, rank)
					return !errors.Is(err, ErrNoSpace)
				})
			}
			if err != nil {
				f.Fatalf("put %d rank %d: %v", n, rank, err)
			}
		}
	}
}

func keys(ns ...uint64) []kv.Key {
	var list []kv.Key
	for _, n := range ns {
		list = append(list, testKey(n))
	}
	return list
}

func (f *fixture) lookup(ns ...uint64) *Lease {
	f.Helper()
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(ns...)})
	must(f, err)
	return l
}

// has says whether key n would be a hit, leaving no trace but a touch.
func (f *fixture) has(n uint64) bool {
	f.Helper()
	l := f.lookup(n)
	defer l.Release()
	return l.Hits() == 1
}

// read loads a piece and verifies all of it.
func read(l *Lease, i int, rank uint32) ([]byte, error) {
	p, err := l.Open(i, rank)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	image, err := os.ReadFile(p.File().Name())
	if err != nil {
		return nil, err
	}
	fail := func(err error) ([]byte, error) { p.Bad(err); return nil, err }
	if len(image) < pieceformat.Page {
		return fail(pieceformat.ErrDamaged)
	}
	h, err := p.Verify(image[:pieceformat.Page])
	if err != nil {
		return fail(err)
	}
	if h.Table != nil {
		return fail(errors.New("a table out of nowhere"))
	}
	if h, err = p.Verify(image); err != nil {
		return fail(err)
	}
	data := image[h.DataOffset:]
	if err := kv.VerifyExtents(h.Plan, 0, len(h.Table), data, 0, h.Table); err != nil {
		return fail(err)
	}
	return data, nil
}

func (f *fixture) mustRead(ns ...uint64) {
	f.Helper()
	for _, n := range ns {
		f.readWhole(n)
	}
}

func (f *fixture) readWhole(n uint64) {
	f.Helper()
	l := f.lookup(n)
	defer l.Release()
	if l.Hits() != 1 {
		f.Fatalf("key %d is a miss", n)
	}
	for rank := range uint32(f.ns.Ranks()) {
		data, err := read(l, 0, rank)
		if err != nil {
			f.Fatalf("key %d rank %d: %v", n, rank, err)
		}
		if !bytes.Equal(data, payload(f.space.Plan(0), testKey(n), rank)) {
			f.Fatalf("key %d rank %d: other bytes than were stored", n, rank)
		}
	}
}

// pieceFile is the path of a published piece.
func (f *fixture) pieceFile(n uint64, rank uint32) string {
	f.Helper()
	k, cl := testKey(n), f.space.Class(0)
	r := f.root()
	r.Lock()
	defer r.Unlock()
	name := ""
	if slot := r.Index.Find(kv.Fingerprint(cl.Namespace.Digest, cl.Group, k), cl.Base, &k); slot != index.None {
		name = r.Index.NameOf(slot, rank)
	}
	return r.path(name, cl, &k, rank)
}

// usage adds up the blocks of all files outside the store's metadata, quarantine included.
func usage(t testing.TB, dir string) (bytes int64, temporaries int) {
	t.Helper()
	err := filepath.WalkDir(dir, func(name string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(dir, name)
		if strings.HasPrefix(rel, pieceformat.MetaDir) && !strings.HasPrefix(rel, pieceformat.QuarantineDir) {
			return nil
		}
		if _, temp := pieceformat.ParseTemp(e.Name()); temp {
			temporaries++
		}
		info, err := staging.OS().Stat(name)
		bytes += pieceformat.Padded(info.Allocated)
		return err
	})
	must(t, err)
	return bytes, temporaries
}

// missing is what is reserved for pieces that are not there.
func (r *root) missing() (n int64) {
	r.Lock()
	defer r.Unlock()
	r.Index.Each(func(slot uint32, _ *index.Entry) {
		n += r.Index.Bytes(slot) - int64(bits.OnesCount64(r.Index.Pieces(slot)))*pieceBytes
	})
	return n
}

// checkUsed compares the account with the disk; nothing may be in flight.
func (f *fixture) checkUsed() {
	f.Helper()
	for i, r := range f.store.Stats().Roots {
		bytes, temps := usage(f, f.cfg.Roots[i].Path)
		bytes += f.store.roots[i].missing()
		if temps != 0 {
			f.Errorf("%d temporaries left", temps)
		}
		if r.Used != bytes {
			f.Errorf("the account says %d bytes, the disk %d", r.Used, bytes)
		}
		if r.Used > r.Capacity {
			f.Errorf("%d bytes used of %d", r.Used, r.Capacity)
		}
	}
}

// must ends a test that cannot go on without what failed.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// noError reports what failed, and lets the test go on.
func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// upTo are the keys from 0 to n-1.
func upTo(n int) []uint64 {
	list := make([]uint64, n)
	for i := range list {
		list[i] = uint64(i)
	}
	return list
}
