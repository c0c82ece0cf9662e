package store

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"
)

// kindOfRoot is what the suite of the kinds expects of one of them, besides what all promise.
type kindOfRoot struct {
	name      string
	set       func(*RootConfig)
	first     int64 // pieces that an entry of two has bytes for once its first one is there
	clears    bool  // a piece of another key that has a put's name goes; otherwise the put fails
	takesHost bool  // another host that shares the root may open it
	drains    bool  // an orderly end copies what it holds to the next level
}

var kindsOfRoots = []kindOfRoot{
	{name: "own", set: func(*RootConfig) {}, first: 2, clears: true},
	{name: "memory", set: func(c *RootConfig) { c.Volatile = true }, first: 2, clears: true, drains: true},
	{name: "shared", set: shareRoot, first: 1, takesHost: true},
}

func shareRoot(c *RootConfig) { c.Shared, c.Poll, c.Lapse = true, 20*time.Millisecond, time.Hour }

func (k *kindOfRoot) open(t *testing.T, entries, ranks int, change ...func(*Config)) *fixture {
	t.Helper()
	return newFixtureIn(t, filepath.Join(t.TempDir(), "root"), entries, ranks, append([]func(*Config){func(c *Config) {
		c.Now = time.Now
		k.set(&c.Roots[0])
	}}, change...)...)
}

// TestKinds: every kind of root keeps what [kind] promises.
func TestKinds(t *testing.T) {
	for _, k := range kindsOfRoots {
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
}

// accountIs waits until the account is the disk's, and that of so many pieces unless they are negative.
func (f *fixture) accountIs(pieces int64) {
	f.Helper()
	await(f, "the account is the disk's", func() bool {
		used, disk := f.store.Stats().Roots[0].Used, onDisk(f, f.cfg.Roots[0].Path)
		return used == disk && (pieces < 0 || used == pieces*pieceBytes)
	})
}

// room: puts go on when the root is full, by evictions of this host or of another, and the account stays within the limit.
func (k *kindOfRoot) room(t *testing.T) {
	f := k.open(t, 8, 1)
	for n := range uint64(40) {
		f.mustPut(n)
		if st := f.store.Stats().Roots[0]; st.Used > st.Capacity {
			t.Fatalf("%d bytes are used of %d after put %d", st.Used, st.Capacity, n)
		}
	}
	f.mustRead(39)
	f.accountIs(-1)
	if there := onDisk(t, f.cfg.Roots[0].Path); there > f.cfg.Roots[0].Capacity || there == 0 {
		t.Errorf("%d bytes on the disk, want some and at most the capacity of %d", there, f.cfg.Roots[0].Capacity)
	}
}

func (k *kindOfRoot) bytesOfAnEntry(t *testing.T) {
	f := k.open(t, 8, 2)
	f.must(f.put(0, 0))
	equal(t, "bytes of an entry with one of two pieces", f.store.Stats().Roots[0].Used, k.first*pieceBytes)
	equal(t, "it is granted with one of two pieces", f.has(0), false)
	f.must(f.put(0, 1))
	equal(t, "bytes of the whole entry", f.store.Stats().Roots[0].Used, 2*pieceBytes)
	f.mustRead(0)
}

// failedPut: nothing of it is on the disk or in the account, and it can be tried again.
func (k *kindOfRoot) failedPut(t *testing.T) {
	f := k.open(t, 8, 1)
	for _, written := range []bool{false, true} {
		p, err := f.store.Put(t.Context(), f.request(0, 0, 0))
		f.must(err)
		if written {
			f.must(write(p))
		}
		p.Abort(errors.New("test"))
		f.accountIs(0)
	}
	f.mustPut(0)
	f.mustRead(0)
	f.accountIs(1)
}

// takenName: a name that a piece of another key has is never given to a second file.
func (k *kindOfRoot) takenName(t *testing.T) {
	f := k.open(t, 128, 1) // its quarantine has room
	f.mustPut(0)
	other, err := os.ReadFile(f.pieceFile(0, 0))
	f.must(err)
	taken := f.builtin(testKey(1))
	f.must(os.MkdirAll(filepath.Dir(taken), 0o700))
	put(t, taken, other)
	if err = f.put(1, 0); k.clears {
		f.must(err)
		f.mustRead(1)
		equal(t, "files in quarantine", f.store.Stats().Roots[0].Quarantined, 1)
	} else if err == nil {
		t.Error("the put was published under a name that a piece of another key has")
	} else if now, rerr := os.ReadFile(taken); rerr != nil || !bytes.Equal(now, other) {
		t.Errorf("the file that had the name is another one now: %v", rerr)
	}
	f.mustRead(0)
}

// removal: lookups miss an entry at once, its files go, and then its bytes.
func (k *kindOfRoot) removal(t *testing.T) {
	f := k.open(t, 8, 1)
	f.mustPut(0, 1, 2)
	f.drop(1)
	equal(t, "a dropped entry is granted", f.has(1), false)
	f.accountIs(2)
	if err := f.put(1, 0); err != nil && !errors.Is(err, ErrNoSpace) { // the evictor may not have heard that it is gone
		t.Error(err)
	}
	await(t, "it can be stored again", func() bool { return f.has(1) || f.put(1, 0) == nil })
	f.mustRead(upTo(3)...)
	f.accountIs(3)
}

func (k *kindOfRoot) restart(t *testing.T) {
	f := k.open(t, 8, 2)
	f.mustPut(0, 1, 2)
	f.restart()
	f.mustRead(upTo(3)...)
	f.accountIs(6)
}

func (k *kindOfRoot) otherHosts(t *testing.T) {
	f := k.open(t, 8, 1)
	for _, shared := range []bool{false, true} {
		c := f.cfg
		var second atomic.Int64
		c.Now = func() time.Time { return time.Unix(second.Add(1), 0) } // or it waits for others that are joining
		c.HostID, c.Roots = "other", []RootConfig{{Path: c.Roots[0].Path, Capacity: c.Roots[0].Capacity, MaxEntries: 64}}
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

func (k *kindOfRoot) end(t *testing.T) {
	f := k.open(t, 8, 1, func(c *Config) {
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
