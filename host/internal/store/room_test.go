package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

// TestFloor leaves a part of a small file system to others, and makes room when they take more.
func TestFloor(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("missing: the right to mount (%v): run as root with CAP_SYS_ADMIN", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	const keep = 1 << 20
	f := newFixture(t, filepath.Join(dir, "root"), 1000, 1, func(c *Config) {
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
	if got := f.store.Stats().Roots[0]; got.Evictions == 0 || got.Limit >= got.Capacity || got.Used > got.Limit {
		t.Errorf("%+v", got)
	}
	must(t, os.WriteFile(filepath.Join(dir, "others"), make([]byte, 600<<10), 0o600))
	await(t, "room is made for others", func() bool { return free() >= keep })
	if f.store.Stats().Roots[0].Entries == 0 {
		t.Error("everything went")
	}
	f.mustPut(300)
	f.mustRead(300)
	f.checkUsed()
}

func (f *fixture) putOf(tenant uint32, n uint64) error {
	q := f.request(n, n, 0)
	q.Tenant = tenant
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

// TestQuotas: a tenant that uses its quota up loses its own entries and nobody else's.
func TestQuotas(t *testing.T) {
	f := newFixture(t, t.TempDir(), 20, 1, func(c *Config) {
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
	f = newFixture(t, t.TempDir(), 20, 1, func(c *Config) { c.Quotas = []Quota{{Last: abi.None, Bytes: pieceBytes}} })
	must(t, f.putOf(3, 1))
	l = f.lookup(1)
	if err := f.putOf(3, 2); !errors.Is(err, ErrNoSpace) {
		t.Errorf("with all of the quota pinned: %v", err)
	}
	l.Release()
	noError(t, f.putOf(3, 2))
	noError(t, f.putOf(4, 3))
	f.checkUsed()
}

// TestFullRootOfTwo: stores go to the root that has room.
func TestFullRootOfTwo(t *testing.T) {
	f, faulty, dir := twoRoots(t, 200, func(c *Config) { c.UpkeepEvery = 20 * time.Millisecond })
	bad, _ := f.spread(20)
	faulty.Set(faultfs.MustRules("write " + dir + "/**.tmp: enospc")...)
	if err := f.putsUntilError(100); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if got := f.store.Stats().Roots[1]; got.State != health.Full || got.Limit >= got.Capacity {
		t.Errorf("%+v", got)
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
		t.Fatalf("%+v", got)
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
	f := newFixture(t, t.TempDir(), 100, 1, func(c *Config) { c.Roots[0].MaxEntries = 3 })
	f.mustPut(0, 1, 2)
	damage(t, f.pieceFile(2, 0))
	l := f.lookup(2)
	if _, err := read(l, 0, 0); err == nil {
		t.Fatal("it reads")
	}
	l.Release()
	f.mustPut(2)
	held := f.lookup(0, 1, 2)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := f.store.Put(ctx, f.request(3, 0, 0)); !errors.Is(err, ErrNoSpace) {
		t.Errorf("got %v", err)
	}
	if st := f.store.Stats().Roots[0]; st.Asks > 2 || st.Held == 0 {
		t.Errorf("%+v", st)
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
