package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/storetest"
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
		t.Errorf("%s is %v, want %v", what, got, want)
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
func newFixture(t testing.TB, entries, ranks int, change ...func(*Config)) *fixture {
	return newFixtureIn(t, testenv.Dir(t), entries, ranks, change...)
}

func newFixtureIn(t testing.TB, dir string, entries int, ranks int, change ...func(*Config)) *fixture {
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
	f.space, err = s.Namespace(context.Background(), f.ns)
	must(f, err)
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
	testenv.Fill(b[:plan.PayloadBytes()], binary.LittleEndian.Uint64(k[:])+uint64(rank))
	return b
}

// write fills a put's file.
func write(p *Put) error {
	pool, err := staging.NewSlots(1, int(p.FileBytes()))
	if err != nil {
		return err
	}
	defer pool.Close()
	return storetest.WritePut(context.Background(), pool, p, payload(p.Plan(), p.q.Key, p.q.Rank))
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
	return f.putAs(f.request(n, parent, rank))
}

// putAs stores one piece.
func (f *fixture) putAs(q PutRequest) error {
	p, err := f.store.Put(context.Background(), q)
	if err != nil {
		return err
	}
	if err := write(p); err != nil {
		p.Abort(err)
		return err
	}
	return p.Publish(context.Background())
}

// late reports whether a store failed because the machine is busy: the evictor's credit has not come yet, or the host's heart stood still for
// so long that the others gave the host up, and it joins again.
func (f *fixture) late(err error) bool {
	return f.cfg.Roots[0].Shared && (errors.Is(err, ErrNoSpace) || errors.Is(err, shared.ErrFenced))
}

func (f *fixture) mustPut(ns ...uint64) {
	f.Helper()
	for _, n := range ns {
		for rank := range uint32(f.ns.Ranks()) {
			err := f.put(n, rank)
			if f.late(err) {
				await(f, fmt.Sprintf("credit for key %d rank %d", n, rank), func() bool {
					err = f.put(n, rank)
					return !f.late(err)
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
	image, err := make([]byte, p.Size()), error(nil)
	fail := func(err error) ([]byte, error) { p.Bad(err); return nil, err }
	if f := p.File(); f.Fd() != staging.NoFd {
		if image, err = os.ReadFile(f.Name()); err != nil { // which needs no aligned memory
			return nil, err
		}
	} else if _, err = f.ReadAt(image, 0); err != nil {
		return fail(err)
	}
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
	clear(data[min(h.Plan.PayloadBytes(), int64(len(data))):]) // which no checksum covers, and no page gets
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
	if l.Hits() == 0 && f.cfg.Roots[0].Shared { // the host may have been given up on a busy machine, and find what there is again
		await(f, fmt.Sprintf("a hit of key %d", n), func() bool {
			l.Release()
			l = f.lookup(n)
			return l.Hits() == 1
		})
	}
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
var must = testenv.OK

// noError reports what failed, and lets the test go on.
var noError = testenv.NoError

// upTo are the keys from 0 to n-1.
func upTo(n int) []uint64 {
	list := make([]uint64, n)
	for i := range list {
		list[i] = uint64(i)
	}
	return list
}

// The ways of tests into a store's roots. The first root is meant where none is named.

func (f *fixture) root() *root    { return f.store.roots[0] }
func (f *fixture) check() error   { return f.root().check() }
func (f *fixture) idle() error    { return f.root().idle() }
func (f *fixture) shared() *joint { return f.root().owner.(*joint) }

// volatile is memory in a directory, so that a test can look at it.
var volatile = Medium{Traits: Traits{Volatile: true}}

// rested waits until no eviction is under way, and lets none begin before resume is called.
func (f *fixture) rested() (resume func()) {
	f.Helper()
	for _, r := range f.store.roots {
		f.must(r.evicting.Take(context.Background(), 0))
	}
	return func() {
		for _, r := range f.store.roots {
			r.endTurn()
		}
	}
}

// maintain does a part of the root's own work.
func (f *fixture) maintain(part Task) {
	f.Helper()
	f.must(f.store.Maintain(context.Background(), 0, part))
}

// drop removes the entry of a key, as one that is not what the index says.
func (f *fixture) drop(n uint64) { f.root().drop(f.markOf(n)) }

// builtin is the file of a piece of group 0 under the built-in name.
func (f *fixture) builtin(k kv.Key) string { return f.root().path("", f.space.Class(0), &k, 0) }

// takeOut takes a root out of service.
func (f *fixture) takeOut(root int) {
	f.store.roots[root].Health.TakeOut("test", unix.EIO, "none")
}

// check compares a root's index with itself and with its account. The lock is not held.
func (r *root) check() error {
	r.Lock()
	defer r.Unlock()
	kept, release := r.Quarantine.Hold()
	defer release()
	return r.Check(kept)
}

// idle checks that nothing is pinned, in flight or leaving.
func (r *root) idle() error {
	if err := r.check(); err != nil {
		return err
	}
	r.Lock()
	defer r.Unlock()
	if n := r.InFlight(); n > 0 {
		return fmt.Errorf("%d entries are in flight", n)
	}
	var err error
	r.Index.Each(func(slot uint32, e *index.Entry) {
		if e.Pins() != 0 || e.Any(index.Evicting|index.Detached) {
			err = fmt.Errorf("slot %d: %d pins, state %#x", slot, e.Pins(), e.State())
		}
	})
	return err
}

func TestStoreAndLoad(t *testing.T) {
	f := newFixture(t, 8, 2)
	if got := f.space.Plan(0).PayloadBytes(); got != 8000 {
		t.Fatalf("payload of %d bytes", got)
	}
	f.mustPut(0, 1, 2)
	f.mustRead(upTo(3)...)
	if l := f.lookup(0, 1, 9, 2); l.Hits() != 2 || !l.Has(1) || l.Has(2) || l.Has(3) {
		t.Errorf("%d hits", l.Hits())
	} else {
		l.Release()
		l.Release()
		if _, err := l.Open(0, 0); !errors.Is(err, ErrLeaseOver) {
			t.Errorf("open after release: %v", err)
		}
	}
	if err := f.put(1, 0); !errors.Is(err, ErrResident) {
		t.Errorf("put of a resident piece: %v", err)
	}
	f.checkUsed()
	f.restart()
	f.mustRead(upTo(3)...)
	f.checkUsed()
}

func TestEntryNeedsAllPieces(t *testing.T) {
	f := newFixture(t, 8, 2)
	must(t, f.put(0, 1))
	if f.has(0) {
		t.Error("a hit with one of two pieces")
	}
	if got := f.store.Stats().Roots[0].Used; got != 2*pieceBytes {
		t.Errorf("%d bytes reserved, want the whole entry", got)
	}
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(0), Ranks: 2})
	if err != nil || l.Hits() != 1 {
		t.Errorf("lookup of rank 1 alone: %v", err)
	}
	l.Release()
	f.restart()
	if f.has(0) {
		t.Error("a hit with one of two pieces after a restart")
	}
	must(t, f.put(0, 0))
	f.mustRead(0)
	f.checkUsed()
}

func TestAbort(t *testing.T) {
	f := newFixture(t, 1, 1)
	ctx := context.Background()
	p, err := f.store.Put(ctx, f.request(0, 0, 0))
	must(t, err)
	if _, err := f.store.Put(ctx, f.request(0, 0, 0)); !errors.Is(err, ErrResident) {
		t.Errorf("a second put of a piece in flight: %v", err)
	}
	if _, err := f.store.Put(ctx, f.request(1, 0, 0)); !errors.Is(err, ErrNoSpace) {
		t.Errorf("a put beside the one that fills the root: %v", err)
	}
	must(t, write(p))
	p.Abort(errors.New("on purpose"))
	p.Abort(errors.New("again"))
	if err := p.Publish(ctx); !errors.Is(err, ErrPutOver) {
		t.Errorf("publish after abort: %v", err)
	}
	if got := f.store.Stats().Roots[0]; got.Used != 0 || got.Entries != 0 || got.Writing != 0 {
		t.Errorf("after abort: %+v", got)
	}
	f.checkUsed()
	f.mustPut(1)
	f.mustRead(1)
}

// TestAfterClose lets go of what a client still held when the store was closed.
func TestAfterClose(t *testing.T) {
	f := newFixture(t, 4, 1)
	f.mustPut(0, 1)
	l := f.lookup(0)
	piece, err := l.Open(0, 0)
	must(t, err)
	p, err := f.store.Put(context.Background(), f.request(2, 1, 0))
	must(t, err)
	must(t, f.store.Close())
	p.Abort(errors.New("the session ended"))
	piece.Close()
	l.Release()
	f.store.EndRequest(1, abi.Hints{})
	if _, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(0)}); !errors.Is(err, ErrClosed) {
		t.Errorf("lookup after close: %v", err)
	}
	if _, err := f.store.Put(context.Background(), f.request(3, 2, 0)); !errors.Is(err, ErrClosed) {
		t.Errorf("put after close: %v", err)
	}
	if got := f.store.Stats().Roots[0].EvictFaults; got != 0 {
		t.Errorf("%d evict policies replaced", got)
	}
	f.start()
	f.mustRead(0, 1)
	f.checkUsed()
}

// TestNamespaceOpensBesideEviction evicts recovered entries of a namespace while a session opens it.
func TestNamespaceOpensBesideEviction(t *testing.T) {
	f := newFixture(t, 6, 1)
	f.mustPut(0, 1, 2, 3, 4, 5)
	old := *f.ns
	f.ns = testNamespace(1)
	f.ns.Model = "test/other"
	f.restart() // opens the other one only
	var both sync.WaitGroup
	both.Go(func() {
		if _, err := f.store.Namespace(context.Background(), &old); err != nil {
			t.Error(err)
		}
	})
	both.Go(func() {
		for n := range uint64(6) {
			noError(t, f.put(100+n, 0))
			f.store.Stats()
		}
	})
	both.Wait()
	f.checkUsed()
}

func TestLeaseKeepsWhatItGrants(t *testing.T) {
	f := newFixture(t, 4, 1)
	f.mustPut(0)
	list := append(keys(0), make([]kv.Key, 0, 1000)...)
	for n := range uint64(999) {
		list = append(list, testKey(1000+n))
	}
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: list})
	must(t, err)
	defer l.Release()
	if l.Hits() != 1 || cap(l.grants) > 8 {
		t.Errorf("%d hits, room for %d", l.Hits(), cap(l.grants))
	}
}

// The store has other tables for the host's side of an evict policy. Its events keep the contract all the same,
// also those of a start.
func TestEventsKeepTheContract(t *testing.T) {
	w := &witness{}
	f := newFixture(t, 6, 1, func(c *Config) { c.Policies.Evict = handle(w.module()) })
	rng := rand.New(rand.NewPCG(1, 1))
	for range 3 {
		var leases []*Lease
		for i := range uint32(60) {
			from := rng.Uint64N(8)
			switch rng.IntN(3) {
			case 0:
				if err := f.put(from, 0); err != nil && !errors.Is(err, ErrResident) && !errors.Is(err, ErrNoSpace) {
					t.Fatal(err)
				}
			case 1:
				f.lookup(from).Release()
			default:
				if len(leases) < 3 {
					leases = append(leases, f.lookup(from, from+1))
				}
			}
			if i%7 == 0 {
				f.store.EndRequest(i, abi.Hints{})
			}
			if len(leases) > 2 {
				leases[0].Release()
				leases = leases[1:]
			}
		}
		for _, l := range leases {
			l.Release()
		}
		r := f.root()
		r.Lock()
		err := r.Evictor.Flush()
		r.Unlock()
		must(t, err)
		w.mu.Lock()
		events := w.events
		w.events = nil
		w.mu.Unlock()
		if len(events) < 60 {
			t.Fatalf("%d events: nothing to check", len(events))
		}
		must(t, policytest.CheckEvents(events))
		f.restart()
	}
}

// A root is made, what is above it is not: where that is missing, a file system is not mounted.
func TestParentIsNotMade(t *testing.T) {
	dir := t.TempDir()
	f := newFixtureIn(t, filepath.Join(dir, "kv"), 4, 1)
	must(t, f.store.Close())
	c := f.cfg
	c.Roots[0].Path = filepath.Join(dir, "mnt", "kv")
	s, err := Open(t.Context(), c)
	if err == nil {
		s.Close()
	}
	if !errors.Is(err, health.ErrNoParent) || !strings.Contains(err.Error(), "mkdir -p "+filepath.Join(dir, "mnt")) {
		t.Errorf("opened in a directory that is not there: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "mnt")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its parent was made: %v", err)
	}
}

// A host that promises more than its file system has says so when it starts, and else does not.
func TestPromisedCapacityIsJudged(t *testing.T) {
	const says = "less room than the root's capacity"
	for _, c := range []struct {
		capacity int64
		warns    bool
	}{{1 << 20, false}, {1 << 60, true}} {
		var log bytes.Buffer
		f := newFixture(t, 4, 1, func(cfg *Config) {
			cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
			cfg.Roots[0].Capacity, cfg.Roots[0].MaxEntries = c.capacity, 64
		})
		must(t, f.store.Close())
		if warned := strings.Contains(log.String(), says); warned != c.warns {
			t.Errorf("capacity %d: warned %v\n%s", c.capacity, warned, log.String())
		}
	}
}

// noSize is a file system that states no size, as ramfs.
type noSize struct{ staging.FS }

func (noSize) Statfs(string) (staging.Space, error) { return staging.Space{}, staging.ErrNoSize }

// A file system without a size evicts nothing for min_free, and it is said that it cannot.
func TestFileSystemWithoutASize(t *testing.T) {
	var log bytes.Buffer
	f := newFixture(t, 4, 1, func(cfg *Config) {
		cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
		cfg.Roots[0].FS, cfg.Roots[0].MinFree = noSize{staging.OS()}, 1<<40
	})
	f.mustPut(0, 1, 2, 3)
	f.mustRead(0, 1, 2, 3)
	must(t, f.store.Close())
	if !strings.Contains(log.String(), "min_free has no effect") || strings.Contains(log.String(), "less room") {
		t.Errorf("want a warning of min_free alone\n%s", log.String())
	}
}
