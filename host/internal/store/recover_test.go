package store

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

func put(t testing.TB, name string, data []byte) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(name), 0o700))
	must(t, os.WriteFile(name, data, 0o600))
}

// TestScanOfAMess opens a root in which crashes, other programs and a careless operator have left what they leave.
func TestScanOfAMess(t *testing.T) {
	dir := t.TempDir()
	f := newFixtureIn(t, dir, 400, 1)
	f.mustPut(0, 1, 2, 3, 4, 5, 6)
	var names []string
	for n := range uint64(7) {
		names = append(names, f.pieceFile(n, 0))
	}
	image := func(n uint64) []byte {
		b, err := os.ReadFile(names[n])
		must(t, err)
		return b
	}
	change := func(n uint64, how func(b []byte) []byte) { put(t, names[n], how(image(n))) }
	must(t, f.store.Close())
	change(1, func(b []byte) []byte { return b[:100] })                          // truncated header
	change(2, func(b []byte) []byte { return b[:2*pieceformat.Page] })           // truncated payload
	change(3, func(b []byte) []byte { b[96] ^= 1; return b })                    // flipped bit in the depth
	change(4, func(b []byte) []byte { return append([]byte(nil), image(6)...) }) // another key's piece under this name
	change(5, func(b []byte) []byte { b[8] = 9; return b })                      // of a later version
	foreign := map[string]string{
		"README.txt": "notes", "other/deep/data.bin": strings.Repeat("x", 3*pieceformat.Page), ".hidden": "h",
		"lost+found/f": "l",
	}
	for name, text := range foreign {
		put(t, filepath.Join(dir, name), []byte(text))
	}
	must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "link")))
	temps := []string{
		filepath.Join(filepath.Dir(names[0]), ".x.kv.testhost.1f.tmp"), filepath.Join(dir, ".y.otherhost.2.tmp"),
	}
	for _, name := range temps {
		put(t, name, make([]byte, 2*pieceformat.Page))
	}
	stranger := image(6)
	h, err := pieceformat.DecodeHeader(stranger)
	must(t, err)
	h.Namespace = kv.Digest([]byte("some other space"))
	h.Encode(stranger)
	put(t, filepath.Join(dir, "stranger"), stranger)

	f.start()
	for n := range uint64(7) {
		if got, want := f.has(n), n == 0 || n == 6; got != want {
			t.Errorf("key %d: hit %t", n, got)
		}
	}
	f.mustRead(0, 6)
	for name, text := range foreign {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != text {
			t.Errorf("foreign file %s: %v", name, err)
		}
	}
	for _, name := range append(temps, names[1:6]...) {
		if _, err := os.Stat(name); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
	st := f.store.Stats().Roots[0]
	equal(t, "Recovered", st.Recovered, 2)
	equal(t, "Quarantined", st.Quarantined, 6)
	equal(t, "Swept", st.Swept, 2)
	equal(t, "Foreign", st.Foreign, 5)
	equal(t, "Unclaimed", st.Unclaimed, 2)
	noError(t, f.idle())
	f.mustPut(1, 2, 3, 4, 5)
	f.mustRead(upTo(7)...)
}

// TestQuarantineIsBounded damages piece after piece.
func TestQuarantineIsBounded(t *testing.T) {
	f := newFixture(t, 100, 1, func(c *Config) { c.QuarantineFiles = 2 })
	for n := range uint64(6) {
		f.mustPut(n)
		b, err := os.ReadFile(f.pieceFile(n, 0))
		must(t, err)
		b[3*pieceformat.Page] ^= 1
		put(t, f.pieceFile(n, 0), b)
		l := f.lookup(n)
		if _, err := read(l, 0, 0); err == nil {
			t.Fatal("a damaged piece was read")
		}
		if _, err := l.Open(0, 0); !errors.Is(err, ErrGone) {
			t.Errorf("the damaged piece again, under the same lease: %v", err)
		}
		if f.has(n) {
			t.Error("a hit after damage, while the lease is held")
		}
		l.Release()
	}
	list, err := os.ReadDir(filepath.Join(f.cfg.Roots[0].Path, pieceformat.QuarantineDir))
	if err != nil || len(list) != 2 {
		t.Errorf("%d files in quarantine, %v", len(list), err)
	}
	st := f.store.Stats().Roots[0]
	equal(t, "Held", st.Held, 2*pieceBytes)
	equal(t, "Damaged", st.Damaged, 6)
	equal(t, "Entries", st.Entries, 0)
	equal(t, "Used", st.Used, st.Held)
	f.checkUsed()
	f.restart()
	if got := f.store.Stats().Roots[0]; got.Held != 2*pieceBytes {
		t.Errorf("after a restart %d bytes held", got.Held)
	}
	f.checkUsed()
}

func TestRootBusy(t *testing.T) {
	dir := t.TempDir()
	f := newFixtureIn(t, dir, 4, 1)
	_, err := Open(context.Background(), f.cfg)
	if !errors.Is(err, ErrRootBusy) || !strings.Contains(err.Error(), dir) ||
		!strings.Contains(err.Error(), "shared = true") {
		t.Errorf("a second host: %v", err)
	}
	two := f.cfg
	two.Roots = []RootConfig{{Path: t.TempDir(), Capacity: 1 << 20}, f.cfg.Roots[0]}
	if _, err := Open(context.Background(), two); !errors.Is(err, ErrRootBusy) {
		t.Errorf("a second host with another root: %v", err)
	}
	two.Roots = two.Roots[:1]
	s, err := Open(context.Background(), two)
	if err != nil {
		t.Fatalf("the free root stayed locked: %v", err)
	}
	s.Close()
	f.restart()
}

func TestCapacityShrinks(t *testing.T) {
	f := newFixture(t, 10, 1)
	f.mustPut(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
	f.cfg.Roots[0].Capacity = 4 * pieceBytes
	f.restart()
	for n := range uint64(10) {
		if got, want := f.has(n), n >= 6; got != want {
			t.Errorf("key %d: hit %t", n, got)
		}
	}
	f.checkUsed()
}

func TestMembershipLookup(t *testing.T) {
	f := newFixture(t, 10, 1)
	for _, n := range []uint64{1, 3} {
		q := f.request(n, n, 0)
		q.Group = 1
		must(t, f.putAs(q))
	}
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Group: 1, Keys: keys(0, 1, 2, 3, 4)})
	if err != nil || l.Hits() != 2 || l.Has(0) || !l.Has(1) || l.Has(2) || !l.Has(3) || l.Has(4) {
		t.Errorf("%d hits, %v", l.Hits(), err)
	}
	if _, err := l.Open(2, 0); !errors.Is(err, ErrLeaseOver) {
		t.Errorf("open of a miss: %v", err)
	}
	if p, err := l.Open(3, 0); err != nil {
		t.Error(err)
	} else {
		l.Release()
		p.Close()
		p.Close()
	}
	noError(t, f.idle())
}

// gated is a file system whose directories below a root cannot be listed until the gate opens, and which has nothing on
// it but what stands there.
type gated struct {
	staging.FS
	dir  string
	used int64
	gate chan struct{}
}

// reopenGated closes the store, ruins its checkpoint and opens it again. The scan waits until the gate opens.
func (f *fixture) reopenGated() *gated {
	f.Helper()
	must(f, f.store.Close())
	dir := f.cfg.Roots[0].Path
	put(f, dir+"/"+pieceformat.CheckpointFile, []byte("no checkpoint"))
	used, _ := usage(f, dir)
	g := &gated{FS: staging.OS(), dir: dir, used: used, gate: make(chan struct{})}
	f.cfg.FS, f.cfg.ScanWait, f.cfg.IOTimeout = g, -1, time.Hour
	f.open()
	return g
}

func (g *gated) ReadDir(name string) ([]fs.DirEntry, error) {
	if rel, below := strings.CutPrefix(name, g.dir+"/"); below && rel != "" &&
		!strings.HasPrefix(rel, pieceformat.MetaDir) {
		<-g.gate
	}
	return g.FS.ReadDir(name)
}

func (g *gated) Statfs(string) (staging.Space, error) {
	return staging.Space{Total: 1 << 40, Free: 1<<40 - g.used, Available: 1<<40 - g.used}, nil
}

// TestServesWhileItScans opens a root after a crash and uses it while its directories cannot be listed.
func TestServesWhileItScans(t *testing.T) {
	const entries, room = 20, 30
	f := newFixture(t, room, 1)
	f.mustPut(upTo(entries)...)
	dir := f.cfg.Roots[0].Path
	g := f.reopenGated()
	within := func() {
		t.Helper()
		if disk, _ := usage(t, dir); disk > f.cfg.Roots[0].Capacity {
			t.Fatalf("%d bytes on disk, of %d", disk, f.cfg.Roots[0].Capacity)
		}
		must(t, f.check())
	}
	select {
	case <-f.store.ScanDone():
		t.Fatal("the scan has ended")
	default:
	}
	if st := f.store.Stats().Roots[0]; !st.Scanning || st.Unscanned == 0 || f.has(3) {
		t.Errorf("during the scan: %+v, want bytes that are not scanned and no hit of key 3", st)
	}
	if err := f.put(3, 0); !errors.Is(err, ErrResident) { // its file is found by its name
		t.Errorf("put of an unseen piece: %v", err)
	}
	f.mustRead(3)
	within()
	stored := uint64(0)
	for n := uint64(100); ; n++ {
		err := f.put(n, 0)
		if errors.Is(err, ErrNoSpace) {
			break
		}
		must(t, err)
		stored++
		f.mustRead(n)
		within()
	}
	if stored == 0 || stored > room-entries {
		t.Errorf("%d stored beside %d unseen, with room for %d", stored, entries, room)
	}
	f.drop(3) // as of a damaged file
	close(g.gate)
	<-f.store.ScanDone()
	if st := f.store.Stats().Roots[0]; st.Scanning || st.Unscanned != 0 || st.Swept != 0 {
		t.Errorf("after the scan: scanning %t, %d bytes not scanned, %d swept, want none", st.Scanning, st.Unscanned, st.Swept)
	}
	f.checkUsed()
	noError(t, f.idle())
	// The policy knows all of them, what was touched during the scan as the newest.
	for n := range uint64(4) {
		f.mustPut(200 + n)
	}
	gone := int(stored) + entries - 1 + 4 - room
	for _, n := range []uint64{0, 1, 2, 4, 5, 6, 100, 100 + stored - 1, 19} {
		if f.has(n) != (n > 6 || n != 3 && int(n) > gone) {
			t.Errorf("key %d: hit %t, after %d evictions", n, f.has(n), gone)
		}
	}
	within()
}

// markOf is the mark of a key's entry.
func (f *fixture) markOf(n uint64) entries.Mark {
	f.Helper()
	l := f.lookup(n)
	defer l.Release()
	if l.Hits() == 0 {
		f.Fatalf("key %d is a miss", n)
	}
	return entries.Mark{Slot: l.grants[0].Slot, Fingerprint: l.grants[0].Fingerprint}
}

// TestClosedBeforeAllIsTold ends the store while the evict policy is told what a scan has found. Its state is not kept,
// since what it has not heard of would never be a victim again.
func TestClosedBeforeAllIsTold(t *testing.T) {
	told := 0
	module := policy.NativeModule("keeper", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) {
		return &keeper{told: &told}, nil
	}).KeepState("keeper/1")
	f := newFixture(t, 20, 1, func(c *Config) { c.Policies.Evict = handle(module) })
	f.mustPut(0, 1, 2)
	r := f.root()
	r.Lock()
	r.BeginScan()
	r.Index.Each(func(_ uint32, e *index.Entry) { e.Unset(index.Announced) })
	r.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.recovery.newScan(false).End(ctx, func(int64) {})
	told = 0
	f.restart()
	_ = f.root().Evictor.Flush()
	if st := f.store.Stats().Roots[0]; st.Scanned != 3 || told != 3 {
		t.Errorf("%d files were scanned, and the policy told of %d entries", st.Scanned, told)
	}
	f.mustRead(2)
}

// quarantined counts the files in a root's quarantine.
func quarantined(t *testing.T, dir string) int {
	t.Helper()
	list, err := os.ReadDir(filepath.Join(dir, pieceformat.QuarantineDir))
	must(t, err)
	return len(list)
}

// TestScanErrorsAreNoDamage: what cannot be read at a start is left where it is, and counted; once it can be, it is a hit. What
// fails once is read again at once.
func TestScanErrorsAreNoDamage(t *testing.T) {
	for _, rule := range []string{
		"read **.kv: eio", "open **.kv: eacces", "read **.kv 2nd: eio", "open **.kv 1st: eio", "stat **.kv 1st: eio",
		"readdir **/? 2nd: emfile", "open **.kv 3rd: emfile",
		"read **/.kvhost/namespaces/* 1st: eio\nread **/.kvhost-copy/namespaces/* 1st: eio",
	} {
		t.Run(rule, func(t *testing.T) {
			f, faulty := faultyFixture(t, 200)
			f.mustPut(0, 1, 2, 3, 4, 5)
			must(t, f.store.Close())
			dir := f.cfg.Roots[0].Path
			must(t, os.Remove(filepath.Join(dir, pieceformat.CheckpointFile)))
			faulty.Set(faultfs.MustRules(rule)...)
			f.start()
			if faulty.Injected() == 0 {
				t.Fatal("the rule struck nothing")
			}
			if n := quarantined(t, dir); n != 0 {
				t.Errorf("%d sound files are in quarantine", n)
			}
			if st := f.store.Stats().Roots[0]; st.Orphaned > 0 != strings.Contains(rule, ".kv: ") || st.Used != 6*pieceBytes {
				t.Errorf("%d bytes of %d are what was left alone, want all or none of six pieces", st.Orphaned, st.Used)
			}
			faulty.Set()
			f.root().recovery.again(t.Context())
			f.mustRead(upTo(6)...)
			f.checkUsed()
			f.restart()
			f.mustRead(upTo(6)...)
			f.checkUsed()
		})
	}
}

// TestQuarantineIsCountedAtAStart: a file in quarantine that gives no answer at a start is in the account, or its root is
// not used yet.
func TestQuarantineIsCountedAtAStart(t *testing.T) {
	f, faulty := faultyFixture(t, 100)
	f.mustPut(0, 1)
	l := f.lookup(0)
	p, err := l.Open(0, 0)
	f.must(err)
	p.Bad(errors.New("on purpose"))
	p.Close()
	l.Release()
	f.accounts("one is in quarantine", 2)
	f.must(f.store.Close())
	faulty.Set(faultfs.MustRules("stat **/quarantine/* 1st: eio")...)
	s, err := Open(t.Context(), f.cfg)
	if err == nil {
		f.store = s
		f.accounts("opened all the same", 2)
		f.must(s.Close())
	}
	if faulty.Injected() == 0 {
		t.Fatal("the rule struck nothing")
	}
	faulty.Set()
	f.start()
	f.accounts("opened again", 2)
	f.checkUsed()
}

// TestScanHangsIsNoDamage: a root that gives no answer in the middle of its scan is scanned again when it is back.
func TestScanHangsIsNoDamage(t *testing.T) { synctest.Test(t, testScanHangsIsNoDamage) }

func testScanHangsIsNoDamage(t *testing.T) {
	f, faulty := faultyFixture(t, 20, func(c *Config) {
		c.IOTimeout, c.UpkeepEvery, c.ScanWait = shortIO, shortIO/100, -1 // of a bubble's clock, which stands still while a disk works
	})
	t.Cleanup(faulty.Release)
	f.mustPut(0, 1, 2)
	must(t, f.store.Close())
	must(t, os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)))
	faulty.Set(faultfs.MustRules("read **.kv 2nd: hang")...)
	f.open()
	f.awaitState(0, health.Out)
	faulty.Release()
	<-f.store.ScanDone()
	time.Sleep(time.Second) // the root may have returned before the scan's end: then the upkeep looks at the file again
	f.mustRead(upTo(3)...)
	f.checkUsed()
}

// TestNamespaceIsDamaged: a namespace survives damage to one of the two copies of its text, whichever it is. When both
// are there and wrong, its pieces wait for a session that opens it, or for fsck. When both are gone they are nobody's.
func TestNamespaceIsDamaged(t *testing.T) {
	copies := pieceformat.Copies(pieceformat.NamespacesDir)
	for _, c := range []struct {
		name  string
		dirs  []string
		spoil func(name string) error
		lost  bool
	}{
		{"a bit of the first", copies[:1], flipBit, false},
		{"a bit of the second", copies[1:], flipBit, false},
		{"a bit of both", copies, flipBit, false},
		{"first gone", copies[:1], os.Remove, false},
		{"second gone", copies[1:], os.Remove, false},
		{"both gone", copies, os.Remove, true},
		{"no bytes", copies[:1], func(name string) error { return os.Truncate(name, 0) }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t, 200, 1)
			f.mustPut(0, 1, 2)
			must(t, f.store.Close())
			dir := f.cfg.Roots[0].Path
			err := os.Remove(filepath.Join(dir, pieceformat.CheckpointFile))
			for _, d := range c.dirs {
				err = errors.Join(err, c.spoil(filepath.Join(dir, d, f.ns.Digest().String())))
			}
			must(t, err)
			f.start()
			if got, want := quarantined(t, dir), map[bool]int{true: 3}[c.lost]; got != want {
				t.Errorf("%d files in quarantine, want %d", got, want)
			}
			for n := range uint64(3) {
				if f.has(n) != (len(c.dirs) == 1) {
					t.Errorf("key %d: hit %t", n, !c.lost)
				}
			}
			f.restart()
			for n := range uint64(3) {
				if f.has(n) == c.lost {
					t.Errorf("key %d after another start: hit %t", n, !c.lost)
				}
			}
			for _, d := range copies {
				b, err := os.ReadFile(filepath.Join(dir, d, f.ns.Digest().String()))
				if err != nil || kv.TextDigest(b) != f.ns.Digest() {
					t.Errorf("the copy in %s is not sound: %v", d, err)
				}
			}
		})
	}
}

func flipBit(name string) error {
	b, err := os.ReadFile(name)
	if err == nil {
		b[len(b)/2] ^= 4
		err = os.WriteFile(name, b, 0o600)
	}
	return err
}

// TestPublishWhereSomethingCannotBeRead leaves alone what stands under a put's name: nobody knows what it is.
func TestPublishWhereSomethingCannotBeRead(t *testing.T) {
	f, faulty := faultyFixture(t, 4)
	f.mustPut(0)
	name := f.pieceFile(0, 0)
	want, err := os.ReadFile(name)
	must(t, err)
	f.drop(0)
	put(t, name, want)
	faulty.Set(faultfs.MustRules("read **.kv: eio")...)
	if err := f.put(0, 0); !errors.Is(err, unix.EIO) {
		t.Errorf("put next to a file that cannot be read: error %v, want %v", err, unix.EIO)
	}
	if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the file is not what it was: %v", err)
	}
	faulty.Set()
	f.mustPut(0)
	f.mustRead(0)
}

// TestScanMeetsAnOrphan: a scan opens a file just before its entry is dropped, and the file would not be unlinked. It is
// in the account once.
func TestScanMeetsAnOrphan(t *testing.T) {
	f, faulty := faultyFixture(t, 8, func(c *Config) { c.IOTimeout, c.UpkeepEvery, c.ScanWait = -1, time.Hour, -1 })
	f.mustPut(0)
	f.must(f.store.Close())
	f.must(os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)))
	faulty.Set(faultfs.MustRules("open **.kv 1st: hang\nremove **.kv: eacces")...)
	release := sync.OnceFunc(faulty.Release)
	defer release()
	f.open()
	f.must(faulty.AwaitHanging(testenv.Context(t), 1))
	if err := f.put(0, 0); !errors.Is(err, ErrResident) { // its file is found by its name
		t.Fatal(err)
	}
	r := f.root()
	r.drop(f.markOf(0))
	release()
	<-f.store.ScanDone()
	f.checkUsed()
	if f.has(0) {
		t.Error("what is about to be unlinked is served")
	}
	faulty.Set()
	f.maintain(RetryRemovals)
	f.checkUsed()
	equal(t, "Used", r.Account.Figures().Used, 0)
}

// TestPlanOfAnotherGeometry has a piece that names the plan of another namespace. The root keeps that plan, and it has as many
// bytes, blocks and extents: its pages alone are of other sizes.
func TestPlanOfAnotherGeometry(t *testing.T) {
	f := newFixture(t, 6, 1)
	f.mustPut(0)
	other := testNamespace(1)
	other.Model = "test/other"
	other.Groups[0].Geometry.Planes[0].PageBytes, other.Groups[0].Geometry.Planes[1].PageBytes = 500, 1500
	space, err := f.store.Namespace(t.Context(), other)
	must(t, err)
	mine := f.space
	f.space = space
	f.mustPut(1)
	f.space = mine

	name := f.pieceFile(0, 0)
	image, err := os.ReadFile(name)
	must(t, err)
	h, err := pieceformat.DecodeHeader(image)
	must(t, err)
	h.Plan = space.Plan(0).Digest()
	noError(t, h.Fits(space.Plan(0)))
	h.Encode(image)
	put(t, name, image)
	if err := f.load(0); !errors.Is(err, pieceformat.ErrWrongPiece) {
		t.Errorf("a piece under another geometry's plan is loaded with %v, want ErrWrongPiece", err)
	}
}
