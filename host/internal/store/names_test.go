package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/staging"
)

// What becomes of names that place policies give, whatever the policies do afterwards.

// linkedPlacer is a place policy that is linked in.
type linkedPlacer func(q *abi.PlaceQuery, dst []byte) []byte

func (p linkedPlacer) Place(q *abi.PlaceQuery, _ []abi.RootFacts, dst []byte) ([]byte, uint32) {
	return p(q, dst), abi.None
}

func (p linkedPlacer) use(name string) *policy.Handle {
	return handle(policy.NativeModule(name, []abi.Role{abi.RolePlace}, func(guest.Info) (any, error) { return p, nil }))
}

func widths(t *testing.T, w string) *policy.Handle {
	return use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: w})
}

// fickle names a piece otherwise each time that it is asked.
func fickle() linkedPlacer {
	var asked atomic.Int64
	return func(_ *abi.PlaceQuery, dst []byte) []byte {
		n := asked.Add(1)
		return fmt.Appendf(dst, "at%d/%d", n%7, n)
	}
}

// ordered is a file system that lists directories in the order of their names, or the other way round.
type ordered struct {
	staging.FS
	back bool
}

func (o ordered) ReadDir(name string) ([]fs.DirEntry, error) {
	list, err := o.FS.ReadDir(name)
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b fs.DirEntry) int { return cmp.Compare(a.Name(), b.Name()) })
	if o.back {
		slices.Reverse(list)
	}
	return list, err
}

// inOrder has scans meet files in one order, or the other.
func inOrder(back bool) func(*Config) {
	return func(c *Config) {
		c.FS, c.ScanWorkers = ordered{staging.OS(), back}, 1
	}
}

// accounts checks that the account has what is on the disk, and how much that is.
func (f *fixture) accounts(when string, pieces int64) {
	f.Helper()
	st := f.store.Stats().Roots[0]
	if disk, _ := usage(f, f.cfg.Roots[0].Path); disk != pieces*pieceBytes || st.Used != disk {
		f.Errorf("%s: %d bytes on disk, not %d, and the account says %d", when, disk, pieces*pieceBytes, st.Used)
	}
}

// namers are place policies, and whether each piece gets a name of the policy's.
func namers(t *testing.T) map[string]struct {
	open func() *policy.Handle
	own  bool
} {
	linked := func(p linkedPlacer) func() *policy.Handle {
		return func() *policy.Handle { return p.use("linked") }
	}
	return map[string]struct {
		open func() *policy.Handle
		own  bool
	}{
		"the built-in one": {func() *policy.Handle { return nil }, false},
		"fanout":           {func() *policy.Handle { return widths(t, "1/1/1") }, true},
		"fickle":           {linked(fickle()), true},
		"one name for all": {linked(func(_ *abi.PlaceQuery, dst []byte) []byte { return append(dst, "heap"...) }), false},
		"out of the root":  {linked(func(_ *abi.PlaceQuery, dst []byte) []byte { return append(dst, "../../out.kv"...) }), false},
		"hidden":           {linked(func(_ *abi.PlaceQuery, dst []byte) []byte { return append(dst, ".kvhost/lock"...) }), false},
		"through others": {linked(func(q *abi.PlaceQuery, dst []byte) []byte {
			if q.Key[7]%2 == 0 {
				return fmt.Appendf(dst, "a/%d/%x.%d", q.Key[0]%4, q.Key[:7], q.Rank)
			}
			return fmt.Appendf(dst, "a/%d", q.Key[0]%4)
		}), false},
		"of other pieces": {linked(func(q *abi.PlaceQuery, dst []byte) []byte {
			other := testKey(uint64(q.Key[0] % 24))
			ns := kv.TextDigest([]byte(testNamespace(2).Text()))
			return fmt.Appendf(dst, "%s/%x/%x/%x_g0_r%d.kv", ns, other[0], other[1]>>4, other[:], 1-q.Rank)
		}), false},
		"of directories of others": {linked(func(q *abi.PlaceQuery, dst []byte) []byte {
			other := testKey(uint64(q.Key[0] % 24))
			ns := kv.TextDigest([]byte(testNamespace(2).Text()))
			return fmt.Appendf(dst, "%s/%02x", ns, other[0])
		}), false},
	}
}

// TestNamesOutliveTheirPolicy: pieces are read, evicted and counted under the names that they were stored under, while
// their policy acts, after it was replaced, after a start from the checkpoint and after a scan under another one.
func TestNamesOutliveTheirPolicy(t *testing.T) {
	testenv.Slow(t)
	const entries = 24
	for name, by := range namers(t) {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, entries, 2, func(c *Config) { c.Policies.Place = by.open() })
			all := func(when string, keys ...uint64) {
				t.Helper()
				for _, n := range keys {
					if !f.has(n) {
						t.Fatalf("%s: key %d is a miss", when, n)
					}
					f.mustRead(n)
				}
				f.checkUsed()
			}
			first := []uint64{0, 1, 2, 3, 4, 5, 6, 7}
			f.mustPut(first...)
			for _, n := range first {
				k := testKey(n)
				if own := f.pieceFile(n, 0) != f.builtin(k); by.own && !own {
					t.Errorf("key %d has the built-in name", n)
				}
			}
			before := f.files()
			all("at once", first...)
			bound := f.store.Stats().Policies
			at := slices.IndexFunc(bound, func(p PolicyStats) bool { return p.Role == abi.RolePlace })
			if _, err := f.store.Swap(t.Context(), Swap{From: bound[at].Name, Policies: [abi.Roles]*policy.Handle{
				abi.RolePlace: widths(t, "4/4"),
			}}); err != nil {
				t.Fatal(err)
			}
			later := append(slices.Clone(first), 8, 9, 10, 11)
			f.mustPut(later[len(first):]...)
			all("under another policy", later...)
			f.cfg.Policies.Place = nil
			f.restart()
			equal(t, "files scanned after an orderly end", f.store.Stats().Roots[0].Scanned, 0)
			all("from a checkpoint, without the policies", later...)
			f.cfg.Policies.Place = fickle().use("next")
			f.crash()
			all("after a scan, under a third policy", later...)
			if got := f.files(); len(got) != 2*len(later) {
				t.Errorf("%d files of %d pieces: %v", len(got), 2*len(later), got)
			}
			for _, rel := range before {
				if !slices.Contains(f.files(), rel) {
					t.Errorf("%s is gone", rel)
				}
			}
			for n := uint64(100); n < 100+2*entries; n++ { // the old ones go
				f.mustPut(n)
				if st := f.store.Stats().Roots[0]; st.Used > st.Capacity {
					t.Fatalf("%d bytes of %d", st.Used, st.Capacity)
				}
			}
			for _, rel := range before {
				if slices.Contains(f.files(), rel) {
					t.Errorf("%s of an evicted piece is there", rel)
				}
			}
			f.checkUsed()
		})
	}
}

// TestAPolicyThatTraps: a module fails until it is in quarantine. Pieces that it named are hits all the time, and new ones
// get the built-in names.
func TestAPolicyThatTraps(t *testing.T) {
	testenv.Slow(t)
	m, err := policy.Open(t.Context(), "fanout", policy.Options{Dir: policytest.Dir(t, "fanout"), Cache: policytest.Cache(t)})
	must(t, err)
	defer m.Close(context.Background())
	f := newFixture(t, 40, 2, func(c *Config) {
		h := policy.NewHandle(m, "", policy.Config{fanout.ConfigWidths: "1/1"}, func(*policy.Module, error) {})
		c.Policies.Place = h.Acquire()
	})
	f.mustPut(0, 1, 2, 3)
	place := f.space.Place.Now().Policy
	for n := uint64(4); m.Quarantined() == nil; {
		if _, _, err := place.Path(&abi.PlaceQuery{KeyLen: 200}, nil); err == nil { // no key has 200 bytes
			continue // it is down
		}
		f.mustRead(upTo(4)...)
		f.mustPut(n)
		f.mustRead(n)
		n++
	}
	before := place.Stats().Calls
	f.mustPut(30)
	f.mustRead(30)
	equal(t, "calls of a policy in quarantine", place.Stats().Calls-before, 0)
	k := testKey(30)
	equal(t, "name", f.pieceFile(30, 0), f.builtin(k))
	f.mustRead(upTo(4)...)
	f.checkUsed()
}

// TestTheHeaderSaysTheName: also of a piece that could not have the name that it was written for.
func TestTheHeaderSaysTheName(t *testing.T) {
	f := newFixture(t, 8, 1, colliding)
	f.mustPut(0, 1)
	for n, want := range []string{"heap/same.kv", ""} {
		h, _, err := f.root().Look(f.pieceFile(uint64(n), 0))
		f.must(err)
		equal(t, fmt.Sprintf("the name in the header of key %d", n), h.Name, want)
	}
	f.mustRead(1)
}

// TestAPieceTwice: a scan finds a piece in two files, or in one of two names. One of them goes, whichever it meets first, and
// the account is the disk's.
func TestAPieceTwice(t *testing.T) {
	testenv.Slow(t)
	for _, back := range []bool{false, true} {
		for _, other := range []string{"0/other", "zz/other", "backup/link"} {
			t.Run(fmt.Sprintf("back=%t/%s", back, other), func(t *testing.T) {
				f := newFixture(t, 8, 2, inOrder(back), func(c *Config) { c.Policies.Place = widths(t, "1/1") })
				f.mustPut(0, 1)
				name, twice := f.pieceFile(0, 1), filepath.Join(f.cfg.Roots[0].Path, other)
				if filepath.Base(other) == "link" { // as a copy by links has
					f.must(os.MkdirAll(filepath.Dir(twice), 0o700))
					f.must(os.Link(name, twice))
				} else {
					image, err := os.ReadFile(name)
					f.must(err)
					put(t, twice, image)
				}
				f.cfg.Policies.Place = nil
				f.crash()
				f.mustRead(0, 1)
				f.accounts("after the scan", 4)
			})
		}
	}
}

// TestARenamedPiece: somebody has given files other names. A scan finds them there; one that no piece can have, and the
// built-in name of another, make the file one of nobody's.
func TestARenamedPiece(t *testing.T) {
	f := newFixture(t, 8, 1)
	f.mustPut(0, 1, 2)
	root := f.cfg.Roots[0].Path
	k := testKey(7)
	taken := f.builtin(k)
	for n, to := range []string{root + "/elsewhere", root + "/with blanks", taken} {
		f.must(os.MkdirAll(filepath.Dir(to), 0o700))
		f.must(os.Rename(f.pieceFile(uint64(n), 0), to))
	}
	f.crash()
	f.mustRead(0)
	equal(t, "the file", f.pieceFile(0, 0), root+"/elsewhere")
	equal(t, "a hit under a name with blanks", f.has(1), false)
	equal(t, "a hit under another piece's name", f.has(2), false)
	equal(t, "Unclaimed", f.store.Stats().Roots[0].Unclaimed, 2)
	f.mustPut(7)
	f.mustRead(7)
	f.checkUsed()
	f.restart()
	f.mustRead(0)
}

// TestPutDuringAScan: a client stores what a scan has not come to. Where its policy gives it the name that it has, or it
// has the built-in one, the put finds it; else there are two files for a while, and one in the end.
func TestPutDuringAScan(t *testing.T) {
	t.Parallel() // it waits more than it works
	moody := fickle()
	for name, c := range map[string]struct {
		first, second func() *policy.Handle
		found         bool
	}{
		"the same policy": {func() *policy.Handle { return widths(t, "1/1") }, func() *policy.Handle { return widths(t, "1/1") }, true},
		"a built-in name": {func() *policy.Handle { return nil }, func() *policy.Handle { return widths(t, "1/1") }, true},
		"another policy":  {func() *policy.Handle { return widths(t, "4/4") }, func() *policy.Handle { return widths(t, "1/1") }, false},
		"a fickle one":    {moody.use0("f"), moody.use0("f"), false},
	} {
		for _, when := range []string{"published before", "published after"} {
			t.Run(name+"/"+when, func(t *testing.T) {
				f := newFixture(t, 6, 2, inOrder(false), func(cfg *Config) { cfg.Policies.Place = c.first() })
				f.mustPut(0)
				f.cfg.Policies.Place = c.second()
				g := f.reopenGated()
				open := sync.OnceFunc(func() { close(g.gate) })
				defer open()
				var puts []*Put
				for rank := range uint32(2) {
					p, err := f.store.Put(t.Context(), f.request(0, 0, rank))
					if found := errors.Is(err, ErrResident); found != c.found {
						t.Errorf("rank %d is found: %t, %v", rank, found, err)
					}
					if err == nil {
						f.must(write(p))
						puts = append(puts, p)
					}
				}
				if when == "published after" {
					open()
					<-f.store.ScanDone()
				}
				for _, p := range puts {
					f.must(p.Publish(t.Context()))
				}
				open()
				<-f.store.ScanDone()
				f.mustRead(0)
				f.checkUsed()
				equal(t, "files", len(f.files()), 2)
			})
		}
	}
}

// use0 opens the policy anew for each store.
func (p linkedPlacer) use0(name string) func() *policy.Handle {
	return func() *policy.Handle { return p.use(name) }
}

// TestATornPiece: a power failure leaves a file under a policy's name without its first page. A scan moves it away; another
// program's file it leaves alone.
func TestATornPiece(t *testing.T) {
	f := newFixture(t, 100, 1, func(c *Config) { c.Policies.Place = fickle().use("f") })
	f.mustPut(0, 1)
	image, err := os.ReadFile(f.pieceFile(0, 0))
	f.must(err)
	clear(image[:pieceformat.Page])
	put(t, f.pieceFile(0, 0), image)
	put(t, f.cfg.Roots[0].Path+"/notes.txt", []byte("not a piece"))
	f.cfg.Policies.Place = nil
	f.crash()
	st := f.store.Stats().Roots[0]
	equal(t, "Quarantined", st.Quarantined, 1)
	equal(t, "Foreign", st.Foreign, 1)
	equal(t, "a hit", f.has(0), false)
	f.mustRead(1)
}

// TestNamesOnASharedRoot: hosts with different place policies, one of which names a piece otherwise each time, load and
// evict each other's pieces, and a host that stores what another stores at the same time under another name loses nothing.
// The hosts stay within the capacity, and all their accounts are the disk's.
func TestNamesOnASharedRoot(t *testing.T) {
	s := newTurns(t)
	a := s.host("a", 24, func(c *Config) { c.Policies.Place = fickle().use("f") })
	b := s.host("b", 24, func(c *Config) { c.Policies.Place = widths(t, "1/1") })
	s.pass(6)
	a.mustPut(0, 1)
	s.pass(3)
	b.mustRead(0)
	b.mustPut(2)
	s.pass(3)
	a.mustRead(2)

	pa, pb := a.begin(3), b.begin(3)
	for _, p := range []*Put{pa, pb} {
		a.must(write(p))
		a.must(p.Publish(t.Context()))
	}
	s.pass(4)
	a.mustRead(3)
	b.mustRead(3)
	files := a.files()
	equal(t, "files of 4 pieces, one of them twice", len(files), 5)
	for _, f := range []*fixture{a, b} {
		equal(t, "the account", f.store.Stats().Roots[0].Used, onDisk(t, s.dir))
	}
	for n := range uint64(60) {
		f := []*fixture{a, b}[n%2]
		if err := f.put(100+n, 0); err != nil && !errors.Is(err, ErrNoSpace) {
			t.Fatal(err)
		}
		s.pass(2)
		s.within()
	}
	for _, rel := range files {
		if slices.Contains(a.files(), rel) {
			t.Errorf("%s of an evicted piece is there", rel)
		}
	}
	s.pass(6)
	for _, f := range []*fixture{a, b} {
		equal(t, "the account in the end", f.store.Stats().Roots[0].Used, onDisk(t, s.dir))
	}
}

// TestAHostDiesAfterALink: a host is killed between the link and its log. Another one learns of the piece, and its name,
// from the header.
func TestAHostDiesAfterALink(t *testing.T) {
	s := newTurns(t)
	a := s.host("a", 24)
	b := s.host("b", 24, func(c *Config) { c.Policies.Place = fickle().use("f") })
	s.pass(6)
	p := b.begin(3)
	a.must(write(p))
	a.must(p.Publish(t.Context()))
	s.pause(b) // it logs nothing any more
	s.pass(40)
	a.mustRead(3)
	equal(t, "the account", a.store.Stats().Roots[0].Used, onDisk(t, s.dir))
	for n := range uint64(40) {
		if err := a.put(100+n, 0); err != nil && !errors.Is(err, ErrNoSpace) {
			t.Fatal(err)
		}
		s.pass(2)
		s.within()
	}
	equal(t, "a hit after it was evicted", a.has(3), false)
}

// A rename can report an error although it happened, and the look that would tell can fail as well.

// TestPublicationInDoubt: neither the publication nor the look at its name says what became of the file. Its bytes stay
// in the account until it is gone.
func TestPublicationInDoubt(t *testing.T) {
	for rule, there := range map[string]bool{"publish ** 1st: eio after": true, "publish ** 1st: eio": false} {
		t.Run(rule, func(t *testing.T) {
			f, faulty := faultyFixture(t, 4)
			faulty.Set(faultfs.MustRules(rule + "\nstat **.kv 1st: estale")...)
			if err := f.put(0, 0); !errors.Is(err, unix.EIO) {
				t.Fatal(err)
			}
			faulty.Set()
			r := f.root()
			if !r.Orphans.Has(f.builtin(testKey(0))) {
				t.Error("a scan would count the file again")
			}
			if disk, _ := usage(t, r.Path); disk > 0 != there || r.Account.Figures().Used != pieceBytes {
				t.Errorf("%d bytes on disk, the account says %d", disk, r.Account.Figures().Used)
			}
			f.maintain(RetryRemovals)
			if disk, _ := usage(t, r.Path); disk != 0 || r.Account.Figures().Used != 0 {
				t.Errorf("%d bytes on disk, the account says %d, and it was tried again", disk, r.Account.Figures().Used)
			}
		})
	}
}

// colliding names all pieces alike.
func colliding(c *Config) {
	c.Policies.Place = linkedPlacer(func(_ *abi.PlaceQuery, dst []byte) []byte {
		return fmt.Append(dst, "heap/same.kv")
	}).use("collides")
}

// TestPublicationInDoubtUnderATakenName: what is removed is the put's own file, not the piece that has the name.
func TestPublicationInDoubtUnderATakenName(t *testing.T) {
	f, faulty := faultyFixture(t, 4, colliding)
	f.mustPut(0)
	faulty.Set(faultfs.MustRules("publish ** 1st: eio\nstat **.kv 1st: estale")...)
	if err := f.put(1, 0); !errors.Is(err, unix.EIO) {
		t.Fatal(err)
	}
	faulty.Set()
	r := f.root()
	if r.Orphans.Has(f.pieceFile(0, 0)) {
		t.Error("a scan would leave the piece out")
	}
	f.maintain(RetryRemovals)
	f.mustRead(0)
	f.checkUsed()
}

// TestNameOfAnOrphan: a put leaves the name that its place policy gave because an orphan of another key has it. The
// orphan stays one.
func TestNameOfAnOrphan(t *testing.T) {
	f, faulty := faultyFixture(t, 4, colliding)
	f.mustPut(0)
	faulty.Set(faultfs.MustRules("remove **: eacces")...)
	f.drop(0)
	f.must(f.put(1, 0))
	f.checkUsed()
	faulty.Set()
	f.maintain(RetryRemovals)
	f.mustRead(1)
	f.checkUsed()
	equal(t, "Used", f.store.Stats().Roots[0].Used, pieceBytes)
}

// TestOrphanOfAPutUnderWay: a put has claimed the name of an orphan. What stands there is in the account once.
func TestOrphanOfAPutUnderWay(t *testing.T) {
	f, faulty := faultyFixture(t, 4, colliding, func(c *Config) { c.IOTimeout, c.UpkeepEvery = -1, time.Hour })
	f.mustPut(0)
	name := f.pieceFile(0, 0)
	faulty.Set(faultfs.MustRules("remove **: eacces\npublish ** 1st: hang")...)
	release := sync.OnceFunc(faulty.Release)
	defer release()
	r := f.root()
	r.drop(f.markOf(0))
	put := make(chan error, 1)
	go func() { put <- f.put(1, 0) }()
	f.must(faulty.AwaitHanging(testenv.Context(t), 1))
	if !r.Orphans.Has(name) {
		t.Error("a scan would take the orphan in")
	}
	r.Discard(name, pieceBytes)
	equal(t, "Used", r.Account.Figures().Used, 2*pieceBytes) // the orphan, and what the put has reserved
	release()
	f.must(<-put)
	f.checkUsed()
	faulty.Set()
	f.maintain(RetryRemovals)
	f.mustRead(1)
	f.checkUsed()
	equal(t, "Used", r.Account.Figures().Used, pieceBytes)
}

// TestQuarantineInDoubt: nobody can say whether a damaged piece was moved into quarantine.
func TestQuarantineInDoubt(t *testing.T) {
	f, faulty := faultyFixture(t, 100) // a piece is no more than the quarantine's share
	f.mustPut(0, 1)
	f.must(os.Truncate(f.pieceFile(0, 0), pieceBytes/2))
	l := f.lookup(0)
	p, err := l.Open(0, 0)
	f.must(err)
	faulty.Set(faultfs.MustRules("publish **/quarantine/* 1st: eio after\nstat **/quarantine/* 1st: estale")...)
	p.Bad(errors.New("cut"))
	p.Close()
	l.Release()
	if faulty.Injected() != 2 {
		t.Fatal(faulty.Injected(), "faults")
	}
	faulty.Set()
	r := f.root()
	if disk, _ := usage(t, r.Path); r.Account.Figures().Used < disk || disk == pieceBytes {
		t.Errorf("%d bytes on disk, the account says %d", disk, r.Account.Figures().Used)
	}
	f.maintain(RetryRemovals)
	f.checkUsed()
	equal(t, "Used", f.store.Stats().Roots[0].Used, pieceBytes)
}
