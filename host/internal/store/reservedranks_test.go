package store

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

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
			f := newFixture(t, t.TempDir(), 5, 4, func(c *Config) {
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
	f.root().Account.Full(bytes, math.MaxInt64, time.Hour)
}

// putRank stores one piece of an entry that has so many ranks.
func (f *fixture) putRank(tenant uint32, n uint64, rank uint32, ranks uint64) error {
	q := f.request(n, n, rank)
	q.Tenant, q.Ranks = tenant, ranks
	p, err := f.store.Put(f.Context(), q)
	if err != nil {
		return err
	}
	if err := write(p); err != nil {
		p.Abort(err)
		return err
	}
	return p.Publish(f.Context())
}

func (f *fixture) mustPutRanks(tenant uint32, n uint64, ranks uint64) {
	f.Helper()
	for rank := range uint32(4) {
		if ranks&(1<<rank) != 0 {
			must(f, f.putRank(tenant, n, rank, ranks))
		}
	}
}

// smallDisk is a file system that has so many bytes for what is below a directory.
type smallDisk struct {
	staging.FS
	dir   string
	bytes int64
}

func (d *smallDisk) Statfs(string) (staging.Space, error) {
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
	f := newFixture(t, disk.dir, 100, ranks, func(c *Config) {
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
	r.Account.Full(0, 0, -time.Hour)
	r.Account.Retry()
	r.drop(entries.Mark{Slot: 1, Fingerprint: r.Index.Fingerprint(1)}, 0)
	for rank := uint32(1); rank < ranks; rank++ {
		must(t, f.put(0, rank))
	}
	freeSpace{r}.measure()
	if got := f.store.Stats().Roots[0].Limit; got != (all-keep)*pieceBytes {
		t.Errorf("all written: limit %d", got)
	}
	f.crash()
	noError(t, f.check())
}
