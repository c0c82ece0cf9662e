package store

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

// openShared is the file system of one life of a host among others of a bucket.
func openShared(t testing.TB, url, id string) *s3fs.FS {
	t.Helper()
	fsys, err := s3fs.Open(s3fs.Config{Path: bucketRoot, Endpoint: url, PathStyle: true, Target: pieceformat.Target, Holder: id,
		Term: 10 * time.Second, Part: 2 * pieceformat.Page, Shared: true})
	must(t, err)
	t.Cleanup(func() { _ = fsys.Close() })
	return fsys
}

// neighbour opens one of several hosts on a bucket.
func neighbour(t testing.TB, url, id string, entries int, change ...func(*Config)) *fixture {
	t.Helper()
	return newFixtureIn(t, "", entries, 1, append([]func(*Config){func(c *Config) {
		c.HostID, c.Now = id, time.Now
		r := &c.Roots[0]
		r.Path, r.FS, r.Traits, r.ForPieces, r.Shared = bucketRoot, openShared(t, url, id), Bucket, true, true
		r.Poll, r.Lapse = 20*time.Millisecond, 2*time.Second
	}}, change...)...)
}

// inTheBucket is the bytes of all pieces as the server counts them.
func inTheBucket(s *s3double.Server) (sum int64) {
	for key, o := range s.Objects() {
		if !strings.Contains(key, "/.") {
			sum += int64(len(o.Body))
		}
	}
	return sum
}

// TestWhoMayShareABucket: a server without conditional writes, and a host that has the bucket for itself, keep others out by name; so do
// hosts that share it.
func TestWhoMayShareABucket(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	refused := func(c Config, want error, say string) {
		t.Helper()
		if o, err := Open(t.Context(), c); err == nil {
			must(t, o.Close())
			t.Errorf("opened, want %v", want)
		} else if !errors.Is(err, want) || !strings.Contains(err.Error(), say) {
			t.Errorf("%v, want %v that says %q", err, want, say)
		}
	}
	own := oneBucket(t, s.URL, 8)
	another := func(of *fixture, fsys *s3fs.FS) Config {
		c := of.cfg
		c.Roots = slices.Clone(c.Roots)
		c.Roots[0].FS = fsys
		return c
	}
	c := another(own, openShared(t, s.URL, "b"))
	c.HostID, c.Roots[0].Shared, c.Roots[0].Poll, c.Roots[0].Lapse = "b", true, time.Second, 10*time.Second
	refused(c, ErrRootBusy, "testhost")
	must(t, own.store.Close())
	a := neighbour(t, s.URL, "a", 8, patient)
	refused(another(own, openBucket(t, s.URL)), ErrRootBusy, "is shared by a.")
	refused(another(a, openShared(t, s.URL, "a")), ErrRootBusy, "lock.a")
	must(t, a.store.Close())
	s.Unconditional = true
	refused(another(a, openShared(t, s.URL, "a")), s3fs.ErrConditions, "conditional writes")
}

// TestSharedBucketHistories has two hosts store, look up and load at random on a bucket whose server fails in all ways, and ends their lives in
// order or without. Nothing wrong is read; what is in the bucket in the end is in the account of
// the next evictor, and within the capacity.
func TestSharedBucketHistories(t *testing.T) {
	testenv.Slow(t)
	t.Parallel() // it waits more than it works
	faults := []s3double.Fault{s3double.Busy, s3double.TooMany, s3double.Broken, s3double.Reset, s3double.ResetLate, s3double.Half,
		s3double.Wrong, s3double.Expired, s3double.Denied, s3double.ActDenied}
	const entries = 40
	for seed := range uint64(2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 41))
			s := startServer(t)
			p := s3double.StartProxy(t, s.URL)
			names := []string{"a", "b"}
			open := func(i int) *fixture { return neighbour(t, p.URL, names[i], entries) }
			hosts := []*fixture{open(0), open(1)}
			loaded, failed, lives := 0, 0, 2
			for range 200 {
				p.Set()
				if random.IntN(4) == 0 {
					p.Set(s3double.Rule{Fault: faults[random.IntN(len(faults))], After: random.IntN(6), Times: 1 + random.IntN(3)})
				}
				i := random.IntN(2)
				f, n := hosts[i], random.Uint64N(100)
				switch l := f.lookup(n); {
				case l.Hits() > 0:
					if data, err := read(l, 0, 0); err != nil {
						failed++
					} else if loaded++; !bytes.Equal(data, payload(f.space.Plan(0), testKey(n), 0)) {
						t.Fatalf("key %d: other bytes than were stored", n)
					}
					l.Release()
				default:
					l.Release()
					_ = f.put(n, 0)
				}
				if random.IntN(40) == 0 {
					p.Set()
					if random.IntN(2) == 0 {
						must(t, f.store.Close())
					} else {
						f.shared().silence() // as if it was killed
						f.kill()
					}
					hosts[i] = open(i)
					lives++
				}
			}
			p.Set()
			for _, f := range hosts {
				must(t, f.store.Close())
			}
			// A put of a killed host may have landed after the list of its evictor's audit: the next term's counts it.
			f := neighbour(t, p.URL, "c", entries)
			await(t, "the next evictor's account is what the server has, within the capacity", func() bool {
				st, in := f.store.Stats().Roots[0], inTheBucket(s)
				return st.Shared.Evictor && st.Shared.State == shared.Active && st.Used == in && in <= f.cfg.Roots[0].Capacity
			})
			if loaded == 0 {
				t.Error("nothing was loaded")
			}
			t.Logf("%d lives, %d loads, %d failed; %d objects", lives, loaded, failed, len(pieces(s)))
		})
	}
}

// TestSharedBucketIsTheLastLevel: what one host's memory has no room for is a hit at another host, and outlives both.
func TestSharedBucketIsTheLastLevel(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	open := func(id string) *fixture {
		return newFixtureIn(t, filepath.Join(t.TempDir(), "near"), 8, 1, func(c *Config) {
			c.HostID, c.Now, c.Moves.Shutdown = id, time.Now, time.Minute
			c.Roots[0].Volatile = true
			c.Roots = append(c.Roots, RootConfig{
				Path: bucketRoot, Medium: Medium{FS: openShared(t, s.URL, id), Traits: Bucket}, Capacity: 200 * pieceBytes, MaxEntries: 1024, Level: 1,
				ForPieces: true, Shared: true, Poll: 20 * time.Millisecond, Lapse: time.Hour,
			})
		})
	}
	a, b := open("a"), open("b")
	for n := range uint64(32) {
		a.mustPut(n)
		a.settle()
	}
	await(t, "chunks that a's memory had no room for are hits at b", func() bool { return len(b.hits(32)) >= 16 })
	b.mustRead(b.hits(32)...)
	must(t, a.store.Close())
	must(t, b.store.Close())
	c := open("c")
	hits := c.hits(32)
	if len(hits) < 30 { // what ends a prefix, and was not asked for, may go
		t.Errorf("%d hits after both have ended, want 30 of 32", len(hits))
	}
	c.mustRead(hits...)
}

// TestAFencedHostKnowsItsObjects: a host that was given up lists the bucket when it has joined again, and reads no head of an object that it
// knows; what was removed in between is a miss.
func TestAFencedHostKnowsItsObjects(t *testing.T) {
	s := startServer(t)
	a, b := neighbour(t, s.URL, "a", 100, patient), neighbour(t, s.URL, "b", 100, patient)
	a.mustPut(upTo(40)...)
	await(t, "b sees what a stored", func() bool { return len(b.hits(40)) == 40 })
	fsys := b.cfg.Roots[0].FS.(*s3fs.FS)
	member, read := b.fellowStats().Member, fsys.Stats().Read
	s.Set("kv/"+strings.TrimPrefix(a.pieceFile(7, 0), bucketRoot+"/"), nil)
	s.Set("kv/"+shared.Dir+"/hosts/"+member, nil)
	await(t, "b joins again and has scanned", func() bool {
		st := b.fellowStats()
		return st.Member != member && st.State == shared.Active
	})
	if more := fsys.Stats().Read - read; more > 10*pieceBytes {
		t.Errorf("%d bytes were read to join again, want few of the %d of 40 objects", more, 40*pieceBytes)
	}
	equal(t, "the object that is gone is a hit", b.has(7), false)
	equal(t, "hits of a host that has joined again", len(b.hits(40)), 39) // it loads them
	equal(t, "bytes in the account", b.store.Stats().Roots[0].Used, inTheBucket(s))
	b.mustRead(0, 39)
}

// TestAnAuditThatIsGivenUp: what it has found is found again in the next term of the same host.
func TestAnAuditThatIsGivenUp(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	p := s3double.StartProxy(t, s.URL)
	a := neighbour(t, p.URL, "a", 100)
	a.mustPut(0)
	body := bytes.Clone(s.Objects()["kv/"+strings.TrimPrefix(a.pieceFile(0, 0), bucketRoot+"/")].Body)
	h, err := pieceformat.DecodeHeader(body)
	must(t, err)
	h.Key = testKey(50)
	h.Encode(body)
	stray := "kv/" + strings.TrimPrefix(a.pieceFile(50, 0), bucketRoot+"/")
	p.Set(s3double.Rule{Fault: s3double.Denied, Method: "GET", In: stray})
	s.Set(stray, body)
	const evictor = "kv/" + shared.Dir + "/evictor"
	for range 2 { // of the first term's audit it is seen that it has asked for the object
		var office map[string]any
		must(t, shared.DecodeControl(s.Objects()[evictor].Body, &office))
		office["term"], office["owner"] = office["term"].(float64)+1, "gone.1"
		b, err := shared.EncodeControl(office)
		must(t, err)
		terms, done := a.fellowStats().Terms, p.Injected()
		s.Set(evictor, b)
		await(t, "another term", func() bool { return a.fellowStats().Terms > terms })
		await(t, "the object is asked for", func() bool { return p.Injected() > done })
	}
	p.Set()
	await(t, "the object is known", func() bool { return a.has(50) })
}
