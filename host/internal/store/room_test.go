package store

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// TestFloor leaves a part of a small file system to others, and makes room when they take more.
func TestFloor(t *testing.T) {
	dir := testenv.SmallDisk(t, 2<<20)
	const keep = 1 << 20
	f := newFixtureIn(t, filepath.Join(dir, "root"), 1000, 1, func(c *Config) {
		c.Roots[0].MinFree, c.UpkeepEvery = keep, 5*time.Millisecond
	})
	free := func() int64 {
		space, err := staging.OS().Statfs(dir)
		must(t, err)
		return space.Available
	}
	for n := range uint64(200) {
		f.mustPut(n)
		if got := free(); got < keep {
			t.Fatalf("%d bytes are left of the file system after %d puts", got, n+1)
		}
	}
	f.mustRead(199)
	if got := f.store.Stats().Roots[0]; got.Evictions == 0 || got.Limit >= got.Capacity {
		t.Errorf("a root with a floor: %+v, want evictions and a limit below its capacity", got)
	}
	await(t, "the limit holds", func() bool { // the last measurement may have found a piece half written, and counted its bytes twice
		got := f.store.Stats().Roots[0]
		return got.Used <= got.Limit
	})
	must(t, os.WriteFile(filepath.Join(dir, "others"), make([]byte, 600<<10), 0o600))
	await(t, "room is made for others", func() bool { return free() >= keep })
	if f.store.Stats().Roots[0].Entries == 0 {
		t.Error("everything went")
	}
	f.mustPut(300)
	f.mustRead(300)
	defer f.rested()() // the upkeep may have just unlinked a file
	f.checkUsed()
}

func (f *fixture) putOf(tenant uint32, n uint64) error {
	q := f.request(n, n, 0)
	q.Tenant = tenant
	return f.putAs(q)
}

// TestQuotas: a tenant that uses its quota up loses its own entries and nobody else's.
func TestQuotas(t *testing.T) {
	f := newFixture(t, 20, 1, func(c *Config) {
		c.Quotas = []Quota{{First: 7, Last: 7, Bytes: 5 * pieceBytes}, {First: 8, Last: 9, Share: 0.1}}
	})
	count := func(from, to uint64) (n int) {
		for k := from; k < to; k++ {
			if f.has(k) {
				n++
			}
		}
		return n
	}
	store := func(tenant uint32, from, to uint64) {
		t.Helper()
		for k := from; k < to; k++ {
			if err := f.putOf(tenant, k); err != nil {
				t.Fatalf("tenant %d, key %d: %v", tenant, k, err)
			}
		}
	}
	store(1, 0, 6)
	store(7, 100, 120)
	store(8, 200, 204)
	store(9, 300, 304)
	for _, c := range []struct {
		from, to uint64
		want     int
	}{{0, 6, 6}, {100, 120, 5}, {115, 120, 5}, {200, 204, 2}, {300, 304, 2}} {
		if got := count(c.from, c.to); got != c.want {
			t.Errorf("of the keys from %d to %d are %d left, want %d", c.from, c.to, got, c.want)
		}
	}
	l := f.lookup(115)
	defer l.Release()
	p, err := f.store.Put(context.Background(),
		func() PutRequest { q := f.request(400, 400, 0); q.Tenant = abi.None; return q }())
	must(t, err)
	p.Abort(errors.New("history"))
	f.checkUsed()
	f.restart()
	store(7, 120, 125)
	if got := count(100, 125); got != 5 {
		t.Errorf("%d entries of tenant 7 after a restart", got)
	}
	if got := count(0, 6); got != 6 {
		t.Errorf("%d entries of tenant 1 after a restart", got)
	}
	f.checkUsed()
	f = newFixture(t, 20, 1, func(c *Config) { c.Quotas = []Quota{{Last: abi.None, Bytes: pieceBytes}} })
	must(t, f.putOf(3, 1))
	l = f.lookup(1)
	if err := f.putOf(3, 2); !errors.Is(err, ErrNoSpace) {
		t.Errorf("with all of the quota pinned: %v", err)
	}
	l.Release()
	noError(t, f.putOf(3, 2))
	noError(t, f.putOf(4, 3))
	f.checkUsed()

	f = newFixture(t, 20, 1, func(c *Config) { // all slots are taken, too
		c.Roots[0].MaxEntries, c.Quotas = 4, []Quota{{First: 7, Last: 7, Bytes: 2 * pieceBytes}}
	})
	store(1, 0, 2)
	store(7, 100, 104)
	if one, seven := count(0, 2), count(100, 104); one != 2 || seven != 2 {
		t.Errorf("in a root without a free slot tenant 1 has %d entries and tenant 7 %d, want 2 each", one, seven)
	}
}

// TestFullRootOfTwo: stores go to the root that has room.
func TestFullRootOfTwo(t *testing.T) {
	f, faulty, _ := twoRoots(t, 200, func(c *Config) { c.UpkeepEvery, c.Now = time.Second, time.Now })
	bad, _ := f.spread(20)
	faulty.Set(faultfs.MustRules("write **/bad/**.tmp: enospc")...)
	if err := f.putsUntilError(100); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if got := f.store.Stats().Roots[1]; got.State != health.Full || got.Limit >= got.Capacity {
		t.Errorf("the root is %v with a limit of %d, want it full and below its capacity of %d", got.State, got.Limit, got.Capacity)
	}
	for n := uint64(1000); n < 1010; n++ {
		f.mustPut(n)
	}
	f.mustRead(bad...)
	faulty.Set()
	f.awaitState(1, health.In)
	got := f.store.Stats().Roots[1]
	equal(t, "Limit", got.Limit, got.Capacity)
	f.checkUsed()
}

// TestReturnOfAFullRoot: a root that was full when it went out of service is in service again, with all of its capacity.
func TestReturnOfAFullRoot(t *testing.T) {
	f, faulty := faultyFixture(t, 20, func(c *Config) { c.UpkeepEvery = time.Hour })
	f.mustPut(0)
	faulty.Set(faultfs.MustRules("write **.tmp: enospc")...)
	if err := f.put(1, 0); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if got := f.store.Stats().Roots[0]; got.State != health.Full || got.Limit >= got.Capacity {
		t.Fatalf("the root is %v with a limit of %d, want it full and below its capacity of %d", got.State, got.Limit, got.Capacity)
	}
	f.takeOut(0)
	faulty.Set()
	f.backIn()
	got := f.store.Stats().Roots[0]
	equal(t, "Limit", got.Limit, got.Capacity)
	for n := range uint64(10) {
		f.mustPut(n + 1)
		f.mustRead(0)
	}
	f.checkUsed()
}

// TestSlotsAreOut: all slots are taken and pinned, and there is something in quarantine, which frees bytes and no slot.
// The put gives up at once.
func TestSlotsAreOut(t *testing.T) {
	f := newFixture(t, 100, 1, func(c *Config) { c.Roots[0].MaxEntries = 3 })
	f.mustPut(0, 1, 2)
	damage(t, f.pieceFile(2, 0))
	l := f.lookup(2)
	if _, err := read(l, 0, 0); err == nil {
		t.Fatal("it reads")
	}
	l.Release()
	f.mustPut(2)
	held := f.lookup(0, 1, 2)
	if _, err := f.store.Put(t.Context(), f.request(3, 0, 0)); !errors.Is(err, ErrNoSpace) {
		t.Errorf("put without a slot: error %v, want %v", err, ErrNoSpace)
	}
	if st := f.store.Stats().Roots[0]; st.Asks > 2 || st.Held == 0 {
		t.Errorf("the policy was asked %d times and %d bytes are in quarantine, want at most 2 and some", st.Asks, st.Held)
	}
	held.Release()
	f.mustPut(3)
}

// damage changes a byte of a file's payload.
func damage(t *testing.T, name string) {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	b[2*pieceformat.Page] ^= 1
	put(t, name, b)
}

func (f *fixture) hasRanks(n, ranks uint64) bool {
	f.Helper()
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(n), Ranks: ranks})
	must(f, err)
	defer l.Release()
	return l.Hits() == 1
}

// TestEnginesShareEntries has two engines with different local ranks store the same keys. What the second one adds is
// reserved like what the first one did, before and after a restart.
func TestEnginesShareEntries(t *testing.T) {
	f := newFixture(t, 2, 4) // room for 8 pieces
	within := func(when string) {
		t.Helper()
		if err := f.check(); err != nil {
			t.Fatalf("%s: the root contradicts itself: %v", when, err)
		}
		f.checkUsed()
	}
	const low, high = 0b0011, 0b1100
	must := func(err error) {
		t.Helper()
		must(t, err)
	}
	for n := range uint64(4) {
		must(f.putRank(0, n, 0, low))
		must(f.putRank(0, n, 1, low))
	}
	within("one engine")
	if used := f.store.Stats().Roots[0].Used; used != 8*pieceBytes {
		t.Fatalf("%d bytes used, the pieces take %d", used, 8*pieceBytes)
	}
	must(f.putRank(0, 3, 2, high)) // evicts 0
	within("a third rank")
	if f.hasRanks(3, high) || f.hasRanks(3, 0) || !f.hasRanks(3, low) || f.hasRanks(0, low) {
		t.Error("key 3 must be there for the first engine only, and key 0 gone")
	}
	must(f.putRank(0, 3, 3, high))
	within("a fourth rank")
	if !f.hasRanks(3, high) || !f.hasRanks(3, 0) {
		t.Error("key 3 is whole and a miss")
	}
	must(f.putRank(0, 2, 3, high))
	must(f.putRank(0, 2, 2, high))
	within("another key")
	if !f.hasRanks(3, 0) || !f.hasRanks(2, 0) || f.hasRanks(1, low) {
		t.Error("keys 2 and 3 fill the root")
	}
	f.restart()
	within("restarted")
	if !f.hasRanks(3, 0) || !f.hasRanks(2, 0) {
		t.Error("a restart lost something")
	}
	if used := f.store.Stats().Roots[0].Used; used != 8*pieceBytes {
		t.Errorf("%d bytes used after the restart, the pieces take %d", used, 8*pieceBytes)
	}
}

// TestRecoveredEntriesAreReserved finds pieces of two engines at the start, each with one rank missing.
func TestRecoveredEntriesAreReserved(t *testing.T) {
	f := newFixture(t, 1, 4)
	must(t, errors.Join(f.putRank(0, 1, 0, 0b0011), f.putRank(0, 1, 2, 0b1100)))
	f.crash()
	r := f.root()
	if used := f.store.Stats().Roots[0].Used; used != 4*pieceBytes {
		t.Errorf("%d bytes used, the entry will take %d", used, 4*pieceBytes)
	}
	must(t, errors.Join(f.putRank(0, 1, 3, 0b1100), f.putRank(0, 1, 1, 0b0011)))
	if !f.hasRanks(1, 0) || len(r.Index.MissingByClass()) != 0 {
		t.Errorf("the entry is not whole; %v are missing", r.Index.MissingByClass())
	}
	f.checkUsed()
}

// TestNoSpaceForAnotherRank pins all there is: a rank that was not reserved is shed, and what is there stays.
func TestNoSpaceForAnotherRank(t *testing.T) {
	f := newFixture(t, 1, 2)
	must(t, errors.Join(f.putRank(0, 1, 0, 0b01), f.putRank(0, 2, 0, 0b01)))
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(1), Ranks: 1})
	if err != nil || l.Hits() != 1 {
		t.Fatal(l, err)
	}
	held, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(2), Ranks: 1})
	if err != nil || held.Hits() != 1 {
		t.Fatal(held, err)
	}
	if err := f.putRank(0, 1, 1, 0b10); !errors.Is(err, ErrNoSpace) {
		t.Errorf("put of a rank that does not fit: %v", err)
	}
	l.Release()
	held.Release()
	if !f.hasRanks(1, 1) || !f.hasRanks(2, 1) {
		t.Error("what was there is gone")
	}
	f.checkUsed()
	noError(t, f.idle())
}

// TestWhatNeverFitsEvictsNothing: an entry is larger than its tenant's quota, or than what the root may take at
// present. That is said before anything goes for it.
func TestWhatNeverFitsEvictsNothing(t *testing.T) {
	const all = 0xf // ranks
	for name, c := range map[string]struct {
		tenant  uint32
		prepare func(f *fixture)
	}{
		"over the quota":     {7, func(*fixture) {}},
		"over what there is": {8, func(f *fixture) { f.ceiling(3 * pieceBytes) }},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 5, 4, func(c *Config) {
				c.Quotas = []Quota{{First: 7, Last: 7, Bytes: 3 * pieceBytes}}
			})
			f.mustPutRanks(c.tenant, 0, 1)
			f.mustPutRanks(c.tenant, 1, 1)
			c.prepare(f)
			if err := f.putRank(c.tenant, 9, 0, all); !errors.Is(err, ErrNoSpace) {
				t.Errorf("put of an entry that never fits: error %v, want %v", err, ErrNoSpace)
			}
			st := f.store.Stats().Roots[0]
			equal(t, "Entries", st.Entries, 2)
			equal(t, "Evictions", st.Evictions, 0)
		})
	}
}

// ceiling makes the file system full at so many bytes.
func (f *fixture) ceiling(bytes int64) {
	f.root().Account.Full(bytes, math.MaxInt64, time.Hour, time.Hour)
}

// putRank stores one piece of an entry that has so many ranks.
func (f *fixture) putRank(tenant uint32, n uint64, rank uint32, ranks uint64) error {
	q := f.request(n, n, rank)
	q.Tenant, q.Ranks = tenant, ranks
	return f.putAs(q)
}

func (f *fixture) mustPutRanks(tenant uint32, n uint64, ranks uint64) {
	f.Helper()
	for rank := range uint32(4) {
		if ranks&(1<<rank) != 0 {
			must(f, f.putRank(tenant, n, rank, ranks))
		}
	}
}

// smallDisk is a file system that has so many bytes for what is below a directory. A test may have something happen before and
// after its space is taken, and after a file is removed, or in place of that.
type smallDisk struct {
	staging.FS
	dir           string
	bytes         int64
	before, after func()
	remove        func(name string) error
}

func (d *smallDisk) Remove(name string) error {
	if d.remove != nil {
		return d.remove(name)
	}
	return d.FS.Remove(name)
}

func (d *smallDisk) Statfs(string) (staging.Space, error) {
	if d.before != nil {
		d.before()
		defer d.after()
	}
	used := int64(0)
	_ = filepath.WalkDir(d.dir, func(name string, e os.DirEntry, err error) error {
		if info, serr := d.FS.Stat(name); serr == nil && err == nil && !e.IsDir() &&
			!strings.Contains(name, pieceformat.MetaDir) {
			used += info.Allocated
		}
		return nil // it has gone meanwhile
	})
	return staging.Space{Total: d.bytes, Free: d.bytes - used, Available: d.bytes - used}, nil
}

// TestReservedRanksAreNotFree: what is reserved for ranks that nobody is writing yet is not on the disk, and will be.
// It counts against min_free, and against what a full disk has shown that it holds.
func TestReservedRanksAreNotFree(t *testing.T) {
	const ranks, keep, all = 8, 4, 40
	disk := &smallDisk{FS: staging.OS(), dir: t.TempDir(), bytes: all * pieceBytes}
	f := newFixtureIn(t, disk.dir, 100, ranks, func(c *Config) {
		c.Roots[0].MinFree, c.FS, c.UpkeepEvery = keep*pieceBytes, disk, time.Hour
	})
	r := f.root()
	for n := range uint64(2) {
		for rank := range uint32(n + 1) { // of eight
			must(t, f.put(n, rank))
		}
	}
	freeSpace{r}.measure()
	if got := f.store.Stats().Roots[0]; got.Limit != (all-keep)*pieceBytes || got.Used != 2*ranks*pieceBytes {
		t.Errorf("limit %d, want %d: %+v", got.Limit, (all-keep)*pieceBytes, got)
	}
	freeSpace{r}.full(pieceBytes, unix.ENOSPC)
	if got := f.store.Stats().Roots[0].Limit; got != 3*pieceBytes {
		t.Errorf("3 pieces are on the full disk, the limit is %d", got/pieceBytes)
	}
	r.Account.Lift()
	r.drop(entries.Mark{Slot: 1, Fingerprint: r.Index.Fingerprint(1)})
	for rank := uint32(1); rank < ranks; rank++ {
		must(t, f.put(0, rank))
	}
	freeSpace{r}.measure()
	if got := f.store.Stats().Roots[0].Limit; got != (all-keep)*pieceBytes {
		t.Errorf("all written: limit %d", got)
	}
	disk.bytes -= 8 * pieceBytes // which others take; a put that finds no recent measurement measures
	for range 200 {
		f.cfg.Now()
	}
	must(t, f.put(1, 2))
	if got := f.store.Stats().Roots[0].Limit; got != (all-keep-8)*pieceBytes {
		t.Errorf("others have taken 8: limit %d", got/pieceBytes)
	}
	f.crash()
	noError(t, f.check())
}

// TestFloorOfWhatLeaves: bytes that are written or unlinked while the free space is measured count once, whichever comes first.
func TestFloorOfWhatLeaves(t *testing.T) {
	const keep, all = 4, 40
	disk := &smallDisk{FS: staging.OS(), dir: t.TempDir(), bytes: all * pieceBytes}
	f := newFixtureIn(t, disk.dir, 100, 1, func(c *Config) {
		c.Roots[0].MinFree, c.FS, c.UpkeepEvery = keep*pieceBytes, disk, time.Hour
	})
	f.mustPut(upTo(10)...)
	r := f.root()
	check := func(when string) {
		t.Helper()
		if got := f.store.Stats().Roots[0].Limit; got != (all-keep)*pieceBytes {
			t.Errorf("%s: limit of %d pieces, want %d", when, got/pieceBytes, all-keep)
		}
	}
	disk.before, disk.after = func() { f.drop(0) }, func() { f.mustPut(20) }
	freeSpace{r}.measure()
	disk.before = nil
	check("one piece leaves before and one comes after")

	removed := 0
	measuring := func(name string) error {
		err := disk.FS.Remove(name)
		if strings.HasSuffix(name, ".kv") { // no directory
			removed++
			freeSpace{r}.measure()
		}
		return err
	}
	disk.remove = measuring
	f.drop(1)
	check("an entry leaves")
	r.dropDamaged(f.markOf(2), 0, f.pieceFile(2, 0), pieceformat.ErrDamaged)
	r.Quarantine.Shrink(1)
	check("a damaged file leaves")
	disk.remove = func(string) error { return unix.EACCES }
	f.drop(3)
	disk.remove = measuring
	r.Orphans.Retry(t.Context())
	check("an orphan leaves")
	if removed != 3 {
		t.Errorf("%d files were removed, want 3", removed)
	}
	freeSpace{r}.measure()
	check("at last")
	f.checkUsed()
}

// TestMoreTenantsThanNumbers finds and stores pieces of tenants that get no number. Nobody else may be billed for them.
func TestMoreTenantsThanNumbers(t *testing.T) {
	f := newFixture(t, 10, 1)
	must(t, f.putOf(1<<20, 0))
	g := f.reopenGated()
	for tenant := range uint32(1<<16 - 1) {
		f.store.catalog.Tenants.Number(tenant)
	}
	close(g.gate)
	<-f.store.ScanDone()
	must(t, f.putOf(1<<20+1, 1))
	r := f.root()
	for n := range uint64(2) {
		slot := f.markOf(n).Slot
		r.Lock()
		tenant := r.TenantOf(slot)
		r.Unlock()
		if tenant != catalog.UnknownTenant {
			t.Errorf("key %d is billed to tenant %d", n, tenant)
		}
	}
	f.checkUsed()
}

func TestTenantsTakeTurnsForRoom(t *testing.T) { synctest.Test(t, testTenantsTakeTurnsForRoom) }

// A put of a new entry, and of another rank of one, is not behind all of a tenant with many.
func testTenantsTakeTurnsForRoom(t *testing.T) {
	f := newFixture(t, 64, 2)
	f.must(f.putRank(2, 31, 0, 0b01))
	resume := f.rested()
	var done [3]atomic.Int32 // by tenant
	for n := range uint64(22) {
		q := f.request(10+n, 10+n, uint32(n/21))
		q.Tenant, q.Ranks = uint32(n/20*2), 1<<q.Rank // the last two are of tenant 2
		go func() {
			_, err := f.store.Put(t.Context(), q)
			noError(t, err)
			done[q.Tenant].Add(1)
		}()
		synctest.Wait() // it waits
	}
	for range 2 { // turns of tenant 1, each behind those that wait beside it
		go f.root().evicting.Take(t.Context(), 1)
		synctest.Wait()
		resume()
		synctest.Wait()
	}
	if n := done[2].Load(); n != 2 {
		t.Errorf("after two turns of another tenant, and %d of one with 20 puts: %d puts of tenant 2 are done, want 2", done[0].Load(), n)
	}
	resume()
	synctest.Wait()
}
