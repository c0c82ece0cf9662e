package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/fsck"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// fellow opens one of several hosts on a directory.
func fellow(t *testing.T, dir, id string, entries int, change ...func(*Config)) *fixture {
	t.Helper()
	return fellowOf(t, dir, id, entries, 1, change...)
}

func fellowOf(t *testing.T, dir, id string, entries, ranks int, change ...func(*Config)) *fixture {
	t.Helper()
	return newFixtureIn(t, dir, entries, ranks, append([]func(*Config){func(c *Config) {
		c.HostID, c.Now = id, time.Now
		c.Roots[0].Shared, c.Roots[0].Poll, c.Roots[0].Lapse = true, 20*time.Millisecond, time.Second
	}}, change...)...)
}

// patient is for hosts of which none may be given up: on a busy machine a heartbeat can be late by more than a second.
func patient(c *Config) { c.Roots[0].Lapse = time.Hour }

// await waits until something holds: how long that takes depends on the machine.
func await(t testing.TB, what string, holds func() bool) {
	t.Helper()
	testenv.Until(t, what, holds)
}

func (f *fixture) fellowStats() shared.Stats { return *f.store.Stats().Roots[0].Shared }

// onDisk adds up pieces, temporaries and what is on its way out, each file once.
func onDisk(t testing.TB, dir string) (bytes int64) {
	t.Helper()
	seen := map[uint64]bool{}
	err := filepath.WalkDir(dir, func(name string, e os.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || e.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(dir, name)
		if strings.HasPrefix(rel, pieceformat.MetaDir) &&
			!strings.Contains(rel, "/t/") && !strings.Contains(rel, "/trash/") &&
			!strings.HasPrefix(rel, pieceformat.QuarantineDir) {
			return nil
		}
		if info, err := staging.OS().Stat(name); err == nil && !seen[info.Ino] {
			seen[info.Ino] = true
			bytes += pieceformat.Padded(info.Allocated)
		}
		return nil
	})
	must(t, err)
	return bytes
}

// meeting is where hosts meet.
type meeting struct {
	open func(id string, entries int, change ...func(*Config)) *fixture
	used func() int64         // bytes of what is there
	rest func(hosts int) bool // there are so many hosts, and nothing is left of others
	// damage changes a byte of a piece, and returns whether it is there still.
	damage func(f *fixture, n uint64) (there func() bool)
	looks  func() int // how often a host has asked for an object; nil where that costs nothing
}

// eachPlace runs a test of hosts that share a directory, and of hosts that share a bucket.
func eachPlace(t *testing.T, test func(t *testing.T, p *meeting)) {
	t.Run("directory", func(t *testing.T) {
		dir := t.TempDir()
		test(t, &meeting{
			open: func(id string, entries int, change ...func(*Config)) *fixture {
				return fellow(t, dir, id, entries, change...)
			},
			used: func() int64 { return onDisk(t, dir) },
			rest: func(hosts int) bool {
				gone, err := os.ReadDir(filepath.Join(dir, shared.Dir, "gone"))
				must(t, err)
				here, err := os.ReadDir(filepath.Join(dir, shared.Dir, "hosts"))
				must(t, err)
				return len(here) == hosts && (hosts == 0 || len(gone) == 0) // the next to come clears what the last have left
			},
			damage: func(f *fixture, n uint64) func() bool {
				name := f.pieceFile(n, 0)
				image, err := os.ReadFile(name)
				must(t, err)
				image[3*pieceformat.Page] ^= 1
				put(t, name, image)
				return func() bool { _, err := os.Stat(name); return !errors.Is(err, fs.ErrNotExist) }
			},
		})
	})
	t.Run("bucket", func(t *testing.T) {
		s := startServer(t)
		test(t, &meeting{
			open: func(id string, entries int, change ...func(*Config)) *fixture {
				return neighbour(t, s.URL, id, entries, change...)
			},
			used: func() int64 { return inTheBucket(s) },
			rest: func(hosts int) bool {
				here, logs := map[string]bool{}, map[string]bool{}
				for key := range s.Objects() {
					rel, _ := strings.CutPrefix(key, "kv/"+shared.Dir+"/")
					switch dir, name, _ := strings.Cut(rel, "/"); dir {
					case "hosts":
						here[name] = true
					case "log":
						logs[filepath.Dir(name)] = true
					}
				}
				return len(here) == hosts && (hosts == 0 || len(logs) <= hosts)
			},
			damage: func(f *fixture, n uint64) func() bool {
				name := "kv/" + strings.TrimPrefix(f.pieceFile(n, 0), bucketRoot+"/")
				body := bytes.Clone(s.Objects()[name].Body)
				body[len(body)/2] ^= 1
				s.Set(name, body)
				return func() bool { _, there := s.Objects()[name]; return there }
			},
			looks: func() int { return int(s.Count("HEAD")) },
		})
	})
}

// TestOneStoresAnotherLoads: what one host publishes another can load without being told by anybody.
func TestOneStoresAnotherLoads(t *testing.T) { eachPlace(t, testOneStoresAnotherLoads) }

func testOneStoresAnotherLoads(t *testing.T, p *meeting) {
	a, b := p.open("a", 100, patient), p.open("b", 100, patient)
	a.mustPut(0, 1, 2, 3)
	await(t, "b sees what a stored", func() bool { return b.has(3) })
	for n := range uint64(4) {
		b.mustRead(n)
	}
	if err := b.put(2, 0); !errors.Is(err, ErrResident) {
		t.Errorf("b stores it again: %v", err)
	}
	b.mustPut(10, 11)
	await(t, "a sees what b stored", func() bool { return a.has(11) })
	a.mustRead(10)
	// Roles: one of them is the evictor, and knows all bytes.
	if ea, eb := a.fellowStats().Evictor, b.fellowStats().Evictor; ea == eb {
		t.Errorf("evictors: a %t, b %t", ea, eb)
	}
	await(t, "the accounts are what is there", func() bool {
		return a.store.Stats().Roots[0].Used == p.used() && b.store.Stats().Roots[0].Used == p.used()
	})
	noError(t, a.idle())
}

// TestCapacityHoldsForAll: three hosts store and load without end, and at no time is there more than the capacity.
func TestCapacityHoldsForAll(t *testing.T) { eachPlace(t, testCapacityHoldsForAll) }

func testCapacityHoldsForAll(t *testing.T, p *meeting) {
	const entries = 60
	var all []*fixture
	for _, id := range []string{"a", "b", "c"} {
		all = append(all, p.open(id, entries, patient))
	}
	ctx, stop := context.WithCancel(context.Background())
	var work sync.WaitGroup
	var mu sync.Mutex
	stored := 0
	for i, f := range all {
		work.Go(func() {
			g := rand.New(rand.NewPCG(uint64(i), 1))
			var held []*Lease // a lease keeps what it is on from being evicted, by whichever host
			end := func(l *Lease) {
				if _, err := read(l, 0, 0); err != nil {
					t.Errorf("a lease, and no load: %v", err)
				}
				l.Release()
			}
			defer func() {
				for _, l := range held {
					end(l)
				}
			}()
			for ctx.Err() == nil {
				n := g.Uint64N(300)
				switch err := f.put(n, 0); {
				case err == nil:
					mu.Lock()
					stored++
					mu.Unlock()
				case !errors.Is(err, ErrResident) && !f.late(err):
					t.Errorf("put: %v", err)
					return
				}
				l := f.lookup(g.Uint64N(300))
				if l.Hits() == 0 {
					l.Release()
					continue
				}
				if held = append(held, l); len(held) > g.IntN(6) { // over a few puts
					end(held[0])
					held = held[1:]
				}
			}
		})
	}
	most := int64(0)
	await(t, "a few capacities were stored", func() bool {
		most = max(most, p.used())
		mu.Lock()
		defer mu.Unlock()
		return stored > 3*entries || t.Failed()
	})
	stop()
	work.Wait()
	if capacity := all[0].cfg.Roots[0].Capacity; most > capacity || most < capacity/2 {
		t.Errorf("%d bytes on disk at most, the capacity is %d", most, capacity)
	}
	await(t, "one of them is the evictor", func() bool {
		evictors := 0
		for _, f := range all {
			if f.fellowStats().Evictor {
				evictors++
			}
		}
		return evictors == 1
	})
	for _, f := range all {
		noError(t, f.check())
	}
}

// TestTheEvictorGoes: it leaves in order, or without a word, with a put half done; another host takes over.
func TestTheEvictorGoes(t *testing.T) {
	t.Parallel() // it waits more than it works
	for _, how := range []string{"in order", "without a word"} {
		eachPlace(t, func(t *testing.T, p *meeting) {
			a, b := p.open("a", 60), p.open("b", 60)
			if !a.fellowStats().Evictor {
				t.Fatal("the first host is not the evictor")
			}
			a.mustPut(0, 1, 2)
			half, err := a.store.Put(context.Background(), a.request(5, 4, 0))
			must(t, err)
			must(t, write(half))
			if how == "in order" {
				half.Abort(nil)
				must(t, a.store.Close())
			} else {
				c := a.shared()
				c.silence() // its heart stands still
			}
			await(t, "b is the evictor", func() bool {
				return b.fellowStats().Evictor && b.fellowStats().State == shared.Active
			})
			await(t, "what a left is cleared away", func() bool {
				return p.rest(1)
			})
			if how != "in order" {
				if err := half.Publish(context.Background()); !errors.Is(err, shared.ErrFenced) && !errors.Is(err, ErrShort) { // it was emptied
					t.Errorf("a host that was given up publishes: %v", err)
				}
				if a.has(1) {
					t.Error("a host that was given up grants a lookup")
				}
			}
			capacity := b.cfg.Roots[0].Capacity
			for n := uint64(100); n < 220 || p.used() < capacity/2 && n < 900; n++ { // a has credit until it is known what it had stored
				if err := b.put(n, 0); err != nil && !b.late(err) {
					t.Fatal(err)
				}
			}
			if disk := p.used(); disk > capacity || disk < capacity/2 {
				t.Errorf("%d bytes on disk, the capacity is %d", disk, capacity)
			}
			b.mustPut(1000)
			b.mustRead(1000)
		})
	}
}

// TestDamageInASharedRoot: the host that finds it asks the evictor to remove the piece; then it can be stored again. To look up what another
// host has stored costs no look at it.
func TestDamageInASharedRoot(t *testing.T) {
	eachPlace(t, func(t *testing.T, p *meeting) {
		a, b := p.open("a", 100, patient), p.open("b", 100, patient)
		a.mustPut(0, 1, 2)
		await(t, "b sees it", func() bool { return b.has(2) })
		if p.looks != nil {
			before := p.looks()
			for range 100 {
				equal(t, "a chunk of another host is a hit", b.has(1), true)
			}
			equal(t, "looks at objects for lookups", p.looks(), before)
		}
		there := p.damage(a, 1)
		l := b.lookup(1)
		if _, err := read(l, 0, 0); err == nil {
			t.Error("a damaged piece was read")
		}
		l.Release()
		equal(t, "a damaged piece is a hit", b.has(1), false)
		await(t, "the damaged piece is gone", func() bool { return !there() })
		await(t, "it can be stored again", func() bool { return a.put(1, 0) == nil })
		await(t, "b sees the new one", func() bool { return b.has(1) })
		b.mustRead(1)
		await(t, "the accounts are what is there", func() bool {
			return a.store.Stats().Roots[0].Used == p.used() && b.store.Stats().Roots[0].Used == p.used()
		})
	})
}

// TestRepairOfASharedRoot: a repair beside hosts that share a directory leaves no bytes that none of them counts.
func TestRepairOfASharedRoot(t *testing.T) {
	testenv.Slow(t)
	const entries, bad = 40, 4
	dir := t.TempDir()
	a, b := fellow(t, dir, "a", entries, patient), fellow(t, dir, "b", entries, patient)
	most := int64(0)
	look := func() { most = max(most, onDisk(t, dir)) }
	fill := func(from uint64) {
		for n := range uint64(2 * entries) {
			f := []*fixture{a, b}[n%2]
			await(t, "a store", func() bool { look(); return f.put(from+n, 0) == nil })
			look()
		}
	}
	for round := range uint64(3) {
		fill(1000 * round)
		damaged := 0
		for n := uint64(2 * entries); n > 0 && damaged < bad; n-- {
			name := a.pieceFile(1000*round+n-1, 0)
			image, err := os.ReadFile(name)
			if err != nil {
				continue
			}
			image[3*pieceformat.Page] ^= 1
			put(t, name, image)
			damaged++
		}
		report, err := fsck.Check(t.Context(), dir, fsck.Options{Repair: true})
		must(t, err)
		if report.Repaired != int64(damaged) || damaged == 0 {
			t.Errorf("%d pieces of %d were repaired, want all", report.Repaired, damaged)
		}
		look()
	}
	fill(9000)
	if capacity := a.cfg.Roots[0].Capacity; most > capacity || most < capacity*3/4 {
		t.Errorf("%d bytes on disk at most, the capacity is %d", most, capacity)
	}
	await(t, "the accounts are what is there", func() bool {
		used := onDisk(t, dir)
		return a.store.Stats().Roots[0].Used == used && b.store.Stats().Roots[0].Used == used
	})
}

// TestRestartOfASharedRoot: hosts come and go, also by being killed, and what is there is found.
func TestRestartOfASharedRoot(t *testing.T) { eachPlace(t, testRestartOfASharedRoot) }

func testRestartOfASharedRoot(t *testing.T, p *meeting) {
	a := p.open("a", 60)
	a.mustPut(0, 1, 2)
	must(t, a.store.Close())
	a = p.open("a", 60)
	for n := range uint64(3) {
		a.mustRead(n)
	}
	b := p.open("b", 60)
	for n := range uint64(3) {
		b.mustRead(n)
	}
	_, err := Open(context.Background(), b.cfg)
	if !errors.Is(err, ErrRootBusy) || !strings.Contains(err.Error(), "same store.host_id, b") {
		t.Errorf("two hosts of one id: %v, want %v, which names the id", err, ErrRootBusy)
	}
	must(t, errors.Join(a.store.Close(), b.store.Close()))
	if !p.rest(0) {
		t.Error("hosts that left are there")
	}
}

// TestNoLinks: a file system that refuses hard links cannot be shared, and says so.
func TestNoLinks(t *testing.T) {
	f := &fixture{TB: t, ns: testNamespace(1)}
	f.cfg = Config{
		Roots: []RootConfig{{Path: t.TempDir(), Capacity: 1 << 20, Shared: true}}, HostID: "a",
		FS: faultfs.New(staging.OS(), faultfs.MustRules("link **: eperm")...),
	}
	if _, err := Open(context.Background(), f.cfg); !errors.Is(err, shared.ErrLinks) {
		t.Errorf("sharing a root without hard links: error %v, want %v", err, shared.ErrLinks)
	}
}

// TestAReservationThatFails: what leaves the account of a shared root leaves what is in flight at the same time. Else
// the evictor would hand the same bytes out twice.
func TestAReservationThatFails(t *testing.T) {
	a := fellow(t, t.TempDir(), "a", 60)
	a.mustPut(0)
	r := a.root()
	c := r.owner.(*joint)
	counted := func() int64 { // as the evictor does
		r.Lock()
		defer r.Unlock()
		return r.Account.Figures().Used - c.inFlight
	}
	before, taken := counted(), errors.New("another host was faster")
	w := reservation{Want: r.want(0, pieceBytes), reuseFor: new(Put), enter: func() error { return taken }}
	if err := c.reserve(t.Context(), w); !errors.Is(err, taken) {
		t.Fatalf("reserving: %v, want %v", err, taken)
	}
	equal(t, "bytes that the evictor counts", counted(), before)
	equal(t, "bytes in flight", c.inFlight, 0)
}

// The evictor grants what its account leaves of the capacity: a piece on the disk that is not in the account takes room
// that others were granted. Every host must count every piece, as it may be the evictor next.

// record is what another host logs of a piece.
func (r *rig) record(h *pieceformat.Header) *shared.Record {
	return &shared.Record{
		Op: shared.Published, Namespace: h.Namespace, Group: h.Group, Rank: h.Rank, Key: h.Key, Pieces: h.Pieces,
		Bytes: r.class.FileBytes(), StoreTime: h.StoreTime,
	}
}

// TestAVictimHasMorePieces: the evictor, or whoever reported the victim, did not know of a piece that another host had
// published. The piece stays when the victim goes.
func TestAVictimHasMorePieces(t *testing.T) {
	for _, when := range []string{"known before the proposal", "learned after it", "found after it"} {
		t.Run(when, func(t *testing.T) {
			r := newRig(t)
			name := r.stored(1)
			other, more := r.write(1, 1)
			if when == "known before the proposal" {
				r.found(other, more)
			}
			v := r.proposed(1)
			switch when {
			case "learned after it":
				r.b.Learn(r.record(more))
			case "found after it":
				r.found(other, more)
			}
			r.must(os.Remove(name))
			r.b.Decide(v, true)
			r.expect("decided", 1, 0)
		})
	}
}

// TestAVictimIsStoredElsewhere: a host that has applied the decision stores the victim again. Logs are read before the
// journal, so the others learn of the new piece while the old one is withheld.
func TestAVictimIsStoredElsewhere(t *testing.T) {
	r := newRig(t)
	name := r.stored(1)
	v := r.proposed(1)
	r.must(os.Remove(name))
	_, h := r.write(1, 0)
	r.b.Learn(r.record(h))
	r.b.Decide(v, true)
	r.expect("decided", 1, 0)
}

// TestRecordOfMoreThanAPiece: what another host says of a piece's size is bounded by the namespace. Beyond that the file tells.
func TestRecordOfMoreThanAPiece(t *testing.T) {
	r := newRig(t)
	_, h := r.write(1, 0)
	rec := r.record(h)
	rec.Bytes = 1 << 40
	r.b.Learn(rec)
	r.expect("learned", 1, 0)
}

// TestRecordOfADormantNamespace: a record is taken at its word while no session here has opened its namespace.
func TestRecordOfADormantNamespace(t *testing.T) {
	r := newRig(t)
	other := testNamespace(2)
	other.Revision = "other"
	put(t, filepath.Join(r.root.Path, pieceformat.NamespacesDir, other.Digest().String()), []byte(other.Text()))
	r.b.Learn(&shared.Record{Op: shared.Published, Namespace: other.Digest(), Key: keyOf(1), Pieces: 1, Bytes: r.class.FileBytes(), StoreTime: 1})
	r.expect("learned", 1, 0)
}

// TestAVetoEndsAReport: a put finds its name taken by a damaged file and is slow to end, so that this host vetoes what it
// has reported itself. The key is not withheld for ever.
func TestAVetoEndsAReport(t *testing.T) {
	r := newRig(t)
	var credit shared.Credit
	m, err := r.begin(1, &credit)
	r.must(err)
	name, h := r.write(1, 0)
	r.must(os.Truncate(name, pieceformat.Page))
	taken := func() {
		r.reportDamaged(r.class, shared.Record{Namespace: h.Namespace, Group: h.Group, Key: h.Key, Pieces: 1})
	}
	taken()
	r.pass(4)
	r.end(m, credit)
	credit = shared.Credit{}
	m, err = r.begin(1, &credit)
	r.must(err)
	taken()
	r.end(m, credit)
	r.pass(4)
	if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a put that has ended is in the way: %v", err)
	}
	r.expect("removed", 0, 0)
}

// TestASparedVictimIsDamaged: nobody can serve its file, which is there all the same.
func TestASparedVictimIsDamaged(t *testing.T) {
	r := newRig(t)
	name := r.stored(1)
	v := r.proposed(1)
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	r.must(err)
	_, err = f.WriteAt(make([]byte, pieceformat.Page), 0)
	r.must(err)
	r.must(f.Close())
	r.b.Decide(v, false)
	r.expect("spared", 0, 1)
	r.must(r.rescan(t.Context()))
	r.expect("after a scan", 0, 1)
}

// TestASparedVictimIsStored: a put of the key begins between the decision and the look at the file.
func TestASparedVictimIsStored(t *testing.T) {
	r := newRig(t)
	name := r.stored(1)
	v := r.proposed(1)
	r.faults.Set(faultfs.MustRules("open " + name + " 1st: hang")...)
	ctx, decided := context.WithCancel(t.Context())
	go func() {
		defer decided()
		r.b.Decide(v, false)
	}()
	r.must(r.faults.AwaitHanging(ctx, 1))
	var credit shared.Credit
	m, err := r.begin(1, &credit)
	r.must(err)
	r.faults.Set()
	<-ctx.Done()
	r.expect("while it is written", 1, 1)
	r.end(m, credit)
	r.pass(1)
	r.expect("the put has come to nothing", 1, 0)
}

// TestStoredAgainWhileItGoes: this host finds that a piece has gone and drops its entry; another host publishes the
// piece anew before the entry has left.
func TestStoredAgainWhileItGoes(t *testing.T) {
	r := newRig(t)
	name := r.stored(1)
	r.must(os.Remove(name))
	v := r.leave(r.slot(1))
	_, h := r.write(1, 0)
	rec := r.record(h)
	learned := r.b.Learn(rec)
	r.set.Lock()
	r.set.FinishEvict(&v)
	r.set.Unlock()
	if !learned { // as a member does at its next step
		learned = r.b.Learn(rec)
	}
	if !learned {
		t.Error("it is still awaited")
	}
	r.expect("learned", 1, 0)
}

// TestDecidedWhileItGoes: the others decide about an entry that was reported before it has left this host's index.
func TestDecidedWhileItGoes(t *testing.T) {
	for _, removed := range []bool{true, false} {
		t.Run(fmt.Sprintf("removed=%t", removed), func(t *testing.T) {
			r := newRig(t)
			name := r.stored(1)
			e := r.leave(r.slot(1))
			v := r.proposed(1)
			want := int64(1)
			if removed {
				r.must(os.Remove(name))
				want = 0
			}
			r.b.Decide(v, removed)
			r.set.Lock()
			r.set.FinishEvict(&e)
			r.set.Unlock()
			r.lookAgain()
			r.expect("decided", want, 0)
		})
	}
}
