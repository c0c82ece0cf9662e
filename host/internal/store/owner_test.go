package store

import (
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// pair is a medium and an owner, and what the suite expects of a root between them, besides what all promise.
type pair struct {
	name      string
	medium    func(t *testing.T, shared bool) *ground
	shared    bool
	first     int64 // pieces that an entry of two has bytes for once its first one is there
	clears    bool  // a piece of another key that has a put's name goes; otherwise the put fails
	takesHost bool  // another host that shares the root may open it
	private   bool  // no other host can reach the root, or TestWhoMayShareABucket has it wait for the lock
	drains    bool  // an orderly end copies what it holds to the next level, and nothing is left
}

// ground is a medium in a test.
type ground struct {
	life  func(c *RootConfig, host string) // a new life of a host begins there
	bytes func() int64                     // of the files that are there
	plant func(name string, data []byte)   // makes a file behind the host's back
}

var pairs = []pair{
	{name: "directory, sole", medium: inDirectory, first: 2, clears: true},
	{name: "directory, joint", medium: inDirectory, shared: true, first: 1, takesHost: true},
	{name: "memory, sole", medium: inMemory, first: 2, clears: true, private: true, drains: true},
	{name: "bucket, sole", medium: onServer, first: 2, clears: true, private: true},
	{name: "bucket, joint", medium: onServer, shared: true, first: 1, takesHost: true},
}

func shareRoot(c *RootConfig) { c.Shared, c.Poll, c.Lapse = true, 20*time.Millisecond, time.Hour }

func inDirectory(t *testing.T, _ bool) *ground {
	dir := filepath.Join(t.TempDir(), "root")
	return &ground{
		life:  func(c *RootConfig, _ string) { c.Path = dir },
		bytes: func() int64 { return onDisk(t, dir) },
		plant: func(name string, data []byte) {
			must(t, os.MkdirAll(filepath.Dir(name), 0o700))
			put(t, name, data)
		},
	}
}

func inMemory(t *testing.T, _ bool) *ground {
	var memory *memfs.FS
	return &ground{
		life: func(c *RootConfig, _ string) {
			var err error
			memory, err = memfs.New(16<<20, slog.New(slog.DiscardHandler))
			must(t, err)
			t.Cleanup(func() { memory.Close() })
			c.Path, c.Medium, c.ForPieces = "memory:", Medium{FS: memory, Traits: Memory}, true
		},
		bytes: func() (sum int64) {
			must(t, staging.Walk(t.Context(), memory, "memory:", "none", 1, func(rel string, _ fs.DirEntry) {
				info, err := memory.Stat("memory:/" + rel)
				must(t, err)
				sum += pieceformat.Padded(info.Size)
			}, func(string, error) {}))
			return sum
		},
		plant: func(name string, data []byte) {
			must(t, memory.MkdirAll(filepath.Dir(name), 0o700))
			f, err := memory.OpenFile(name, newTemp, 0o600)
			must(t, err)
			_, err = f.WriteAt(data, 0)
			must(t, errors.Join(err, f.Close()))
		},
	}
}

func onServer(t *testing.T, shared bool) *ground {
	s := startServer(t)
	return &ground{
		life: func(c *RootConfig, host string) {
			open := openBucket
			if shared {
				open = func(t testing.TB, url string) *s3fs.FS { return openShared(t, url, host) }
			}
			c.Path, c.Medium, c.ForPieces = bucketRoot, Medium{FS: open(t, s.URL), Traits: Bucket}, true
		},
		bytes: func() int64 { return inTheBucket(s) },
		plant: func(name string, data []byte) { s.Set(strings.TrimPrefix(name, s3fs.Scheme+"bucket/"), data) },
	}
}

func (k *pair) open(t *testing.T, entries, ranks int, change ...func(*Config)) (*fixture, *ground) {
	t.Helper()
	at := k.medium(t, k.shared)
	return newFixtureIn(t, "", entries, ranks, append([]func(*Config){func(c *Config) {
		c.Now = time.Now
		at.life(&c.Roots[0], c.HostID)
		if k.shared {
			shareRoot(&c.Roots[0])
		}
	}}, change...)...), at
}

// TestPairs: a root keeps what [owner] promises, between every medium and every owner that it can have.
func TestPairs(t *testing.T) {
	for _, k := range pairs {
		t.Run(k.name, func(t *testing.T) {
			t.Run("room", k.room)
			t.Run("bytes of an entry", k.bytesOfAnEntry)
			t.Run("a put that fails", k.failedPut)
			t.Run("a name that is taken", k.takenName)
			t.Run("an entry that goes", k.removal)
			t.Run("a start", k.restart)
			t.Run("other hosts", k.otherHosts)
			t.Run("an end", k.end)
		})
	}
	t.Run("lent, sole", lentRoot)
}

// accountIs waits until the account is the medium's, and that of so many pieces unless they are negative.
func (f *fixture) accountIs(at *ground, pieces int64) {
	f.Helper()
	await(f, "the account is the medium's", func() bool {
		used, disk := f.store.Stats().Roots[0].Used, at.bytes()
		return used == disk && (pieces < 0 || used == pieces*pieceBytes)
	})
}

// room: puts go on when the root is full, by evictions of this host or of another, and the account stays within the limit.
func (k *pair) room(t *testing.T) {
	f, at := k.open(t, 8, 1)
	for n := range uint64(40) {
		f.mustPut(n)
		if st := f.store.Stats().Roots[0]; st.Used > st.Capacity {
			t.Fatalf("%d bytes are used of %d after put %d", st.Used, st.Capacity, n)
		}
	}
	f.mustRead(39)
	f.accountIs(at, -1)
	if there := at.bytes(); there > f.cfg.Roots[0].Capacity || there == 0 {
		t.Errorf("%d bytes are there, want some and at most the capacity of %d", there, f.cfg.Roots[0].Capacity)
	}
}

func (k *pair) bytesOfAnEntry(t *testing.T) {
	f, _ := k.open(t, 8, 2)
	f.must(f.put(0, 0))
	equal(t, "bytes of an entry with one of two pieces", f.store.Stats().Roots[0].Used, k.first*pieceBytes)
	equal(t, "it is granted with one of two pieces", f.has(0), false)
	f.must(f.put(0, 1))
	equal(t, "bytes of the whole entry", f.store.Stats().Roots[0].Used, 2*pieceBytes)
	f.mustRead(0)
}

// failedPut: nothing of it is there or in the account, and it can be tried again.
func (k *pair) failedPut(t *testing.T) {
	f, at := k.open(t, 8, 1)
	for _, written := range []bool{false, true} {
		p, err := f.store.Put(t.Context(), f.request(0, 0, 0))
		f.must(err)
		if written {
			f.must(write(p))
		}
		p.Abort(errors.New("test"))
		f.accountIs(at, 0)
	}
	f.mustPut(0)
	f.mustRead(0)
	f.accountIs(at, 1)
}

// takenName: a name that a piece of another key has is never given to a second file.
func (k *pair) takenName(t *testing.T) {
	f, at := k.open(t, 128, 1) // its quarantine has room
	f.mustPut(0)
	read := func(name string) []byte {
		data, _, err := pieceformat.ReadFile(f.root().FS, name, 4<<20)
		f.must(err)
		return data
	}
	other, taken := read(f.pieceFile(0, 0)), f.builtin(testKey(1))
	at.plant(taken, other)
	if err := f.put(1, 0); k.clears {
		f.must(err)
		f.mustRead(1)
		equal(t, "files in quarantine", f.store.Stats().Roots[0].Quarantined, 1)
	} else if err == nil {
		t.Error("the put was published under a name that a piece of another key has")
	} else if !bytes.Equal(read(taken), other) {
		t.Error("the file that had the name is another one now")
	}
	f.mustRead(0)
}

// removal: lookups miss an entry at once, its files go, and then its bytes.
func (k *pair) removal(t *testing.T) {
	f, at := k.open(t, 64, 1) // the evictor of a bucket makes room for credit ahead of need
	f.mustPut(0, 1, 2)
	f.drop(1)
	equal(t, "a dropped entry is granted", f.has(1), false)
	f.accountIs(at, 2)
	if err := f.put(1, 0); err != nil && !errors.Is(err, ErrNoSpace) { // the evictor may not have heard that it is gone
		t.Error(err)
	}
	await(t, "it can be stored again", func() bool { return f.has(1) || f.put(1, 0) == nil })
	f.mustRead(upTo(3)...)
	f.accountIs(at, 3)
}

// restart: what is there is found, and is in the account.
func (k *pair) restart(t *testing.T) {
	f, at := k.open(t, 8, 2)
	f.mustPut(0, 1, 2)
	f.must(f.store.Close())
	at.life(&f.cfg.Roots[0], f.cfg.HostID)
	f.start()
	if k.drains {
		equal(t, "entries after a start", f.store.Stats().Roots[0].Entries, 0)
		f.accountIs(at, 0)
		return
	}
	f.mustRead(upTo(3)...)
	f.accountIs(at, 6)
}

// otherHosts: a host that wants the root for itself is kept away, and so is one that shares it unless all do.
func (k *pair) otherHosts(t *testing.T) {
	if k.private {
		return
	}
	f, at := k.open(t, 8, 1)
	for _, shared := range []bool{false, true} {
		c := f.cfg
		var second atomic.Int64
		c.Now = func() time.Time { return time.Unix(second.Add(1), 0) } // or it waits for others that are joining
		c.HostID, c.Roots = "other", []RootConfig{{Capacity: c.Roots[0].Capacity, MaxEntries: 64}}
		at.life(&c.Roots[0], c.HostID)
		if shared {
			shareRoot(&c.Roots[0])
		}
		s, err := Open(t.Context(), c)
		if err == nil {
			f.must(s.Close())
		}
		if opens := shared && k.takesHost; opens != (err == nil) || err != nil && !errors.Is(err, ErrRootBusy) {
			t.Errorf("another host, shared = %t, opens the root: got %v, want success %t or %v", shared, err, opens, ErrRootBusy)
		}
	}
}

// end: what goes with the host is copied to the next level, and nothing else is.
func (k *pair) end(t *testing.T) {
	f, _ := k.open(t, 8, 1, func(c *Config) {
		c.Moves.Shutdown = time.Minute
		c.Roots = append(c.Roots, RootConfig{
			Path: filepath.Join(t.TempDir(), "far"), Capacity: 64 * pieceBytes, MaxEntries: 64, Level: 1,
		})
	})
	f.mustPut(0, 1, 2, 3) // nothing continues the last one, which the next level does not want
	f.must(f.store.Close())
	f.cfg.Roots = f.cfg.Roots[1:]
	f.start()
	for n := range uint64(3) {
		equal(t, "the next level has it", f.has(n), k.drains)
	}
}

// lentRoot: entries come by loans alone, go without a file being touched, and none is left after a start. A file that is bad is its
// lender's fault.
func lentRoot(t *testing.T) {
	f, o := among(t, 8)
	f.mustPut(upTo(16)...)
	lent := func() int { return f.store.Stats().Roots[1].Entries }
	equal(t, "entries of stores in the root of what is lent", lent(), 0)
	f.borrow(20, 0, 1)
	equal(t, "root of an entry that is lent", f.rootOf(20), 1)
	key := testKey(20)
	file, err := f.store.beyond.roots[0].FS.OpenFile(f.store.beyond.roots[0].path("", f.space.Class(0), &key, 0), os.O_RDWR, 0)
	f.must(err)
	_, err = file.WriteAt(make([]byte, pieceformat.Page), 0)
	f.must(errors.Join(err, file.Close()))
	if f.load(20) == nil {
		t.Error("a piece without a header was loaded")
	}
	if o.blamed.Load() != 1 {
		t.Error("the lender was not blamed once for a file that is bad")
	}
	equal(t, "entries after a file was bad", lent(), 0)
	f.borrow(21, 0, 1)
	f.restart()
	equal(t, "entries of loans after a start", lent(), 0)
}

// TestPublishedAfterItsEntryWent: a piece that is published when its entry was evicted meanwhile is removed. If the entry was forgotten with
// all others, the file stays, since the next scan finds it.
func TestPublishedAfterItsEntryWent(t *testing.T) {
	for _, forgotten := range []bool{false, true} {
		f := newFixture(t, 4, 1)
		p := f.begin(0)
		must(t, write(p))
		r := f.root()
		r.Lock()
		if forgotten {
			entries.Forget(&r.Set, p.mark.Slot)
		} else {
			v := r.BeginEvict(p.mark.Slot)
			r.FinishEvict(&v)
		}
		r.Unlock()
		if err := p.Publish(t.Context()); !errors.Is(err, ErrGone) {
			t.Errorf("forgotten %v: publishing: %v, want ErrGone", forgotten, err)
		}
		if _, err := os.Stat(p.target); forgotten != (err == nil) {
			t.Errorf("forgotten %v: the file: %v", forgotten, err)
		}
		if !forgotten {
			f.checkUsed()
		}
	}
}

// TestRestOfAVictim: of a victim that was spared all files are looked at, also those that only the evictor knew; of one that was removed only
// the others, and those that came since.
func TestRestOfAVictim(t *testing.T) {
	f := newFixture(t, 4, 1)
	f.mustPut(0)

	known := &pendingEviction{entry: true, learned: map[string]bool{"later": true}}
	known.Eviction = entries.Eviction{Class: f.space.Class(0), Key: testKey(0), Pieces: 1}
	own := known.files()[0]
	for _, c := range []struct {
		d       *pendingEviction
		victim  []string
		removed bool
		want    []string
	}{
		{known, []string{own, "other"}, false, []string{own, "later", "other"}},
		{known, []string{own, "other"}, true, []string{"later"}},
		{known, []string{"other"}, true, []string{own, "later"}},
		{&pendingEviction{}, []string{own, "other"}, false, []string{own, "other"}},
		{&pendingEviction{}, []string{own, "other"}, true, nil},
	} {
		if got := c.d.rest(c.victim, c.removed); !slices.Equal(got, c.want) {
			t.Errorf("entry %v, victim %q, removed %v: %q, want %q", c.d.entry, c.victim, c.removed, got, c.want)
		}
	}
}
