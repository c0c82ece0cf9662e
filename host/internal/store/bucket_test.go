package store

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

const bucketRoot = "s3://bucket/kv"

// TestMain gives the keys of a bucket to all tests: those that run in parallel cannot set them for themselves.
func TestMain(m *testing.M) {
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} {
		if err := os.Setenv(name, "key"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// startServer starts a server that takes parts of two pages.
func startServer(t testing.TB) *s3double.Server {
	s := s3double.Start(t)
	s.LeastPart = 2 * pieceformat.Page
	return s
}

// openBucket is the file system of one life of a host.
func openBucket(t testing.TB, url string) *s3fs.FS {
	t.Helper()
	fsys, err := s3fs.Open(s3fs.Config{Path: bucketRoot, Endpoint: url, PathStyle: true, Target: pieceformat.Target, Holder: "testhost",
		Term: 10 * time.Second, Part: 2 * pieceformat.Page, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	t.Cleanup(func() { _ = fsys.Close() })
	return fsys
}

// inBucket has the last of a fixture's roots in a bucket.
func inBucket(t testing.TB, url string) func(*Config) {
	return func(c *Config) {
		r := &c.Roots[len(c.Roots)-1]
		r.Path, r.FS, r.Traits, r.ForPieces = bucketRoot, openBucket(t, url), Bucket, true
	}
}

// life gives the fixture's last root the file system of a new life, and starts the store.
func (f *fixture) life(url string) {
	f.Helper()
	inBucket(f, url)(&f.cfg)
	f.start()
}

// pieces are the keys of objects that are pieces.
func pieces(s *s3double.Server) (keys []string) {
	for key := range s.Objects() {
		if !strings.Contains(key, "/.") {
			keys = append(keys, key)
		}
	}
	return keys
}

// threeLevels is a fixture of memory and disk that hold so many entries, and a bucket.
func threeLevels(t *testing.T, url string, near, mid, far int) *fixture {
	f := newFixtureIn(t, filepath.Join(t.TempDir(), "near"), near, 1, func(c *Config) {
		c.Roots[0].Volatile = true
		c.Roots = append(c.Roots,
			RootConfig{Path: filepath.Join(t.TempDir(), "mid"), Capacity: int64(mid) * pieceBytes, MaxEntries: 1024, Level: 1},
			RootConfig{Capacity: int64(far) * pieceBytes, MaxEntries: 1024, Level: 2})
		c.Moves.Shutdown = time.Minute
		inBucket(t, url)(c)
	})
	return f
}

// TestBucketIsTheLastLevel: entries are demoted into a bucket and read from there, after an orderly end, which costs the next start
// no request for an object, and after a kill.
func TestBucketIsTheLastLevel(t *testing.T) {
	s := startServer(t)
	f := threeLevels(t, s.URL, 8, 16, 256)
	for n := range uint64(64) {
		f.mustPut(n)
		f.settle()
	}
	inBucketNow := 0
	for n := range uint64(64) {
		if f.rootOf(n) == 2 {
			inBucketNow++
		}
	}
	if inBucketNow < 40 || len(pieces(s)) < inBucketNow {
		t.Fatalf("%d entries and %d objects in the bucket, want at least 40 of 64 and as many", inBucketNow, len(pieces(s)))
	}
	for _, kill := range []bool{false, true} {
		if kill {
			f.kill()
		} else {
			must(t, f.store.Close())
		}
		before := s.Count("GET")
		f.life(s.URL)
		if got, most := s.Count("GET")-before, 12; !kill && got > most {
			t.Errorf("a start after an orderly end has read %d objects, want at most %d", got, most)
		}
		await(t, "all heads are read", func() bool { return f.listed() == 0 })
		heads := s.Count("HEAD") + s.Count("GET") + s.Count("LIST")
		here := uint64(0)
		for n := range uint64(64) {
			if f.rootOf(n) >= 0 {
				here++
			}
		}
		if asked := s.Count("HEAD") + s.Count("GET") + s.Count("LIST") - heads; asked != 0 {
			t.Errorf("%d requests for 64 lookups, want none", asked)
		}
		if here < 56 {
			t.Errorf("%d entries are hits after a start (kill: %v), want all but those of the memory", here, kill)
		}
		for n := range uint64(64) {
			if f.rootOf(n) >= 0 {
				f.mustRead(n)
				f.settle()
			}
		}
		if up := s.Uploads(); len(up) > 0 {
			t.Errorf("multipart uploads %v, want none", up)
		}
	}
	for i, r := range f.store.Stats().Roots {
		if r.Used > r.Capacity {
			t.Errorf("root %d has %d bytes of %d", i, r.Used, r.Capacity)
		}
	}
	equal(t, "demotions that were shed", f.moved(2, moves.Demotion).Shed.Load(), 0)
	for range 2 {
		for n := range uint64(64) {
			if f.rootOf(n) == 2 {
				f.mustRead(n)
				f.settle()
			}
		}
	}
	if n := f.moved(0, moves.Promotion).Done.Load(); n == 0 {
		t.Error("nothing that was loaded from the bucket again and again came nearer")
	}
}

// oneBucket is a fixture with one root, in a bucket.
func oneBucket(t *testing.T, url string, entries int, change ...func(*Config)) *fixture {
	return newFixtureIn(t, "", entries, 1, append([]func(*Config){func(c *Config) { c.Now = time.Now }, inBucket(t, url)}, change...)...)
}

// TestBucketStaysWithinItsCapacity, and its account is what the server has.
func TestBucketStaysWithinItsCapacity(t *testing.T) {
	s := startServer(t)
	f := oneBucket(t, s.URL, 8)
	for n := range uint64(40) {
		f.mustPut(n)
		if st := f.store.Stats().Roots[0]; st.Used > st.Capacity {
			t.Fatalf("%d bytes are used of %d after put %d", st.Used, st.Capacity, n)
		}
	}
	f.mustRead(39)
	equal(t, "copies for files of victims", s.Count("COPY"), 0)
	await(t, "the account is the server's", func() bool {
		return f.store.Stats().Roots[0].Used == int64(len(pieces(s)))*pieceBytes
	})
	p, err := f.store.Put(t.Context(), f.request(100, 0, 0))
	must(t, err)
	must(t, write(p))
	p.Abort(errors.New("test"))
	equal(t, "a put that was given up is a hit", f.has(100), false)
	f.restart()
	f.mustRead(39)
}

// TestBucketHasADailyBudget: what is stored in a day is bounded, in few requests, and the count outlives a kill.
func TestBucketHasADailyBudget(t *testing.T) {
	s := startServer(t)
	f := oneBucket(t, s.URL, 64, withBudget(20))
	f.mustPut(upTo(16)...)
	most := s.Count("PUT")
	stored := func() (n int) {
		for k := uint64(100); k < 200; k++ {
			err := f.putUnder(k, k-1, 0)
			if err != nil { // where little of the day is left, only what asks again is stored
				err = f.putUnder(k, k-1, 0)
			}
			if err == nil {
				n++
			}
		}
		return n
	}
	equal(t, "stores after 16 of 20 pieces", stored(), 4)
	if most > 2*16+8 {
		t.Errorf("%d objects were put for 16 stores", most)
	}
	f.kill()
	f.life(s.URL)
	equal(t, "stores after a kill on the same day", stored(), 0)
}

// TestObjectsOfOthers: what was removed, damaged or replaced behind the host's back is a miss, and counted.
func TestObjectsOfOthers(t *testing.T) {
	s := startServer(t)
	f := oneBucket(t, s.URL, 64)
	f.mustPut(upTo(5)...)
	key := func(n uint64) string { return "kv/" + strings.TrimPrefix(f.pieceFile(n, 0), bucketRoot+"/") }
	body := func(n uint64) []byte { return bytes.Clone(s.Objects()[key(n)].Body) }
	s.Set(key(0), nil)
	bad := body(1)
	bad[len(bad)/2] ^= 1
	s.Set(key(1), bad)
	s.Set(key(2), body(3))
	s.Set(key(3), body(3)[:5000])
	for n := range uint64(4) {
		l := f.lookup(n)
		if _, err := read(l, 0, 0); err == nil {
			t.Errorf("object %d was loaded", n)
		}
		l.Release()
		equal(t, fmt.Sprintf("object %d is a hit after its load has failed", n), f.has(n), false)
	}
	f.mustRead(4)
	st := f.store.Stats().Roots[0]
	if st.Vanished != 1 || st.Quarantined != 3 {
		t.Errorf("%d vanished and %d in quarantine, want 1 and 3", st.Vanished, st.Quarantined)
	}
	f.mustPut(0, 1, 2, 3)
	f.mustRead(upTo(5)...)
}

// TestServerFails: a server that refuses takes its root out of service, or out of use for stores, until it refuses no more; no entry
// is lost by it.
func TestServerFails(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	p := s3double.StartProxy(t, s.URL)
	for _, c := range []struct {
		rule  s3double.Rule
		state health.State
		hits  int
	}{
		{s3double.Rule{Fault: s3double.Expired}, health.Out, 0},
		{s3double.Rule{Fault: s3double.Denied}, health.Out, 0},
		{s3double.Rule{Fault: s3double.Denied, Method: "PUT"}, health.ReadOnly, 20},
	} {
		p.Set()
		f := oneBucket(t, p.URL, 64, func(c *Config) { c.UpkeepEvery = 5 * time.Millisecond })
		f.mustPut(upTo(20)...)
		p.Set(c.rule)
		for n := range uint64(20) {
			_ = f.load(n)
			_ = f.put(100+n, 0)
		}
		f.awaitState(0, c.state)
		equal(t, "entries that are hits while the server refuses", len(f.hits(20)), c.hits)
		probed := p.Injected() + 3
		testenv.Until(t, "three probes", func() bool {
			equal(t, "the root's state while the server refuses", f.store.Stats().Roots[0].State, c.state)
			return p.Injected() >= probed
		})
		p.Set()
		f.awaitState(0, health.In)
		equal(t, "entries that are hits when the server is back", len(f.hits(20)), 20)
		f.mustRead(upTo(20)...)
		must(t, f.store.Close())
		for key := range s.Objects() {
			s.Set(key, nil)
		}
	}
}

// TestLapsedLock: a root whose lock cannot be renewed may not be written, and says so before a store fails.
func TestLapsedLock(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	p := s3double.StartProxy(t, s.URL)
	f := oneBucket(t, p.URL, 8, func(c *Config) {
		c.UpkeepEvery = 5 * time.Millisecond
		fsys, err := s3fs.Open(s3fs.Config{Path: bucketRoot, Endpoint: p.URL, PathStyle: true, Target: pieceformat.Target, Holder: "testhost",
			Term: 4 * time.Second, Part: 2 * pieceformat.Page}) // a busy machine renews it late
		must(t, err)
		t.Cleanup(func() { _ = fsys.Close() })
		c.Roots[0].FS = fsys
	})
	stored := func(key uint64) { // after a lapse that the machine's other work has caused, too
		testenv.Until(t, "a store", func() bool { return f.put(key, 0) == nil }, func() any { return f.store.Stats().Roots[0] })
	}
	stored(1)
	p.Set(s3double.Rule{Fault: s3double.Denied, Method: "PUT"})
	f.awaitState(0, health.ReadOnly)
	f.mustRead(1)
	p.Set()
	f.awaitState(0, health.In)
	stored(2)
}

// TestOneWriter: a second host of a bucket's prefix is refused by name.
func TestOneWriter(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	f := oneBucket(t, s.URL, 8)
	c := f.cfg
	c.Roots = []RootConfig{c.Roots[0]}
	inBucket(t, s.URL)(&c)
	if o, err := Open(t.Context(), c); err == nil {
		must(t, o.Close())
		t.Error("two hosts have one prefix of a bucket")
	} else if !errors.Is(err, ErrRootBusy) || !strings.Contains(err.Error(), fmt.Sprintf("testhost (process %d)", os.Getpid())) {
		t.Errorf("the second host: %v, want %v and who has it", err, ErrRootBusy)
	}
}

// TestEndsDuringAnUpload ends the host at each request of a store in parts, before and after the server has acted on it. The next
// start leaves no upload, and all objects are counted: what is whole is a hit.
func TestEndsDuringAnUpload(t *testing.T) {
	s := startServer(t)
	p := s3double.StartProxy(t, s.URL)
	f := oneBucket(t, p.URL, 64)
	f.mustPut(0)
	equal(t, "parts of a piece", s.Count("PART"), 2)
	n, left := uint64(0), 0
	for _, fault := range []s3double.Fault{s3double.Denied, s3double.ActDenied} {
		for step := range 4 {
			n++
			p.Set(s3double.Rule{Fault: fault, After: step, In: ".kv"})
			if err := f.put(n, 0); err == nil {
				t.Errorf("%s from request %d on: the store succeeded", fault, step)
			}
			if len(s.Uploads()) > 0 {
				left++
			}
			p.Set() // so that the lock is given back
			f.kill()
			f.life(p.URL)
			if up := s.Uploads(); len(up) > 0 {
				t.Errorf("%s from request %d on: the next start leaves uploads %v", fault, step, up)
			}
			there := int64(len(pieces(s)))
			equal(t, "bytes in the account", f.store.Stats().Roots[0].Used, there*pieceBytes)
			equal(t, "hits", int64(len(f.hits(n+1))), there)
			f.mustRead(f.hits(n + 1)...)
		}
	}
	if left < 4 {
		t.Errorf("%d ends left an upload, want at least 4 of 8", left)
	}
}

// TestBucketHistories has hosts store, look up and load at random, with a bucket as the last of three levels whose server fails in all
// ways, and ends their lives in order or without. Nothing wrong is read, no level is over its capacity, and what the bucket has in the
// end is in the account, without an upload that is left.
func TestBucketHistories(t *testing.T) {
	testenv.Slow(t)
	faults := []s3double.Fault{s3double.Busy, s3double.TooMany, s3double.Broken, s3double.Reset, s3double.ResetLate, s3double.Half,
		s3double.Wrong, s3double.Expired, s3double.Denied, s3double.ActDenied}
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 37))
			s := startServer(t)
			p := s3double.StartProxy(t, s.URL)
			f := threeLevels(t, p.URL, 4, 8, 24)
			loaded, failed, lives := 0, 0, 0
			for range 6 {
				for range 60 {
					p.Set()
					if random.IntN(3) == 0 {
						p.Set(s3double.Rule{Fault: faults[random.IntN(len(faults))], After: random.IntN(6), Times: 1 + random.IntN(2)})
					}
					n := random.Uint64N(80)
					switch random.IntN(3) {
					case 0:
						_ = f.put(n, 0)
					case 1:
						_ = f.putUnder(n, n+1, 0)
					default:
						l := f.lookup(n)
						if l.Hits() > 0 {
							data, err := read(l, 0, 0)
							if err != nil {
								failed++
							} else if loaded++; !bytes.Equal(data, payload(f.space.Plan(0), testKey(n), 0)) {
								t.Fatalf("key %d: other bytes than were stored", n)
							}
						}
						l.Release()
					}
					for i, r := range f.store.Stats().Roots {
						if r.Used > r.Capacity {
							t.Fatalf("root %d has %d bytes of %d", i, r.Used, r.Capacity)
						}
					}
					if random.IntN(4) == 0 {
						f.settle()
					}
				}
				p.Set()
				if lives++; random.IntN(2) == 0 {
					must(t, f.store.Close())
				} else {
					f.kill()
				}
				f.life(p.URL)
			}
			f.settle()
			f.kill() // so that the next life counts what is there
			f.life(p.URL)
			st := f.store.Stats().Roots[2]
			damaged := 0
			for key := range s.Objects() {
				if strings.HasPrefix(key, "kv/"+pieceformat.QuarantineDir) {
					damaged++
				}
			}
			equal(t, "bytes in the account", st.Used, int64(len(pieces(s))+damaged)*pieceBytes)
			if up := s.Uploads(); len(up) > 0 || loaded == 0 {
				t.Errorf("uploads %v are left, %d loads, want none and some", up, loaded)
			}
			t.Logf("%d lives, %d loads, %d failed; %d objects, %d in quarantine", lives, loaded, failed, len(pieces(s)), damaged)
		})
	}
}

// TestLendOfBucket: other hosts are neither told of what is in a bucket nor lent it, also where nothing else is there.
func TestLendOfBucket(t *testing.T) {
	f := newFixtureIn(t, t.TempDir(), 4, 1, inBucket(t, startServer(t).URL))
	f.mustPut(1)
	l, err := f.store.Lend(f.space.Digest, anyone{}, LookupRequest{Keys: keys(1), Ranks: 1, Leading: true})
	must(t, err)
	if l.Hits() != 0 {
		t.Errorf("%d entries of a bucket are lent, want none", l.Hits())
	}
	l.Release()
	if f.store.Lends() {
		t.Error("it says that it lends")
	}
	f.store.Lendable(func(list []entries.Change) bool {
		t.Errorf("%d entries of a bucket are told, want none", len(list))
		return false
	})
}
