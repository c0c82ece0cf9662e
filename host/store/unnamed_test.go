package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

// Pieces whose files nobody can name when they go.

// moody is a place policy that chooses a root that there is not while it fails, and can change its names.
type moody struct {
	fails   atomic.Bool
	changes atomic.Int64
}

func (m *moody) Place(q *abi.PlaceQuery, _ []abi.RootFacts, dst []byte) ([]byte, uint32) {
	if m.fails.Load() {
		return dst, 77
	}
	return fmt.Appendf(dst, "moody/%d_%x.r%d", m.changes.Load(), q.Key, q.Rank), abi.None
}
func (*moody) Unplace([]byte) abi.PathIdentity { return abi.PathIdentity{} }

func moodyFixture(t *testing.T, entries, ranks int) (*fixture, *moody, *faultfs.FS) {
	place, faulty := &moody{}, faultfs.New(staging.OS())
	return newFixture(t, t.TempDir(), entries, ranks, func(c *Config) {
		c.FS, c.UpkeepEvery = faulty, time.Hour
		m := policy.NativeModule("moody", []abi.Role{abi.RolePlace}, func(guest.Info) (any, error) { return place, nil })
		c.Policies.Place = policy.NewHandle(m, "", nil, func(*policy.Module, error) {})
	}), place, faulty
}

// accounts checks that the account has what is on the disk, and how much that is.
func (f *fixture) accounts(when string, pieces int64) {
	f.Helper()
	st := f.store.Stats().Roots[0]
	if disk, _ := usage(f, f.cfg.Roots[0].Path); disk != pieces*pieceBytes || st.Used != disk {
		f.Errorf("%s: %d bytes on disk, not %d, and the account says %d", when, disk, pieces*pieceBytes, st.Used)
	}
}

// TestEvictionWithoutAName: the place policy fails while an entry goes. The bytes stay in the account until it can be
// asked again.
func TestEvictionWithoutAName(t *testing.T) {
	f, place, _ := moodyFixture(t, 2, 1)
	f.mustPut(0, 1)
	r, m := f.store.roots[0], f.markOf(0)
	place.fails.Store(true)
	r.drop(m, 0)
	place.fails.Store(false)
	st := f.store.Stats().Roots[0]
	equal(t, "Orphaned", st.Orphaned, pieceBytes)
	equal(t, "Used", st.Used, 2*pieceBytes)
	r.Orphans.Retry(context.Background())
	st = f.store.Stats().Roots[0]
	equal(t, "Orphaned", st.Orphaned, 0)
	equal(t, "Used", st.Used, pieceBytes)
	f.checkUsed()
	f.mustPut(0)
	f.mustRead(0)
}

// TestAPieceUnderOneOfTwoNames: one rank of an entry has the built-in name, the other the policy's, where it is cut, or
// cannot be read for a while. When the entry goes, so does its file, and its bytes are accounted for until then.
func TestAPieceUnderOneOfTwoNames(t *testing.T) {
	for name, spoil := range map[string]func(f *fixture, faulty *faultfs.FS, file string){
		"cut": func(f *fixture, _ *faultfs.FS, file string) { f.must(os.Truncate(file, pieceformat.Page-5)) },
		"unreadable": func(_ *fixture, faulty *faultfs.FS, _ string) {
			faulty.Set(faultfs.MustRules("read **moody/**: eio")...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, place, faulty := moodyFixture(t, 2, 2)
			place.fails.Store(true)
			f.must(f.put(0, 0))
			place.fails.Store(false)
			f.must(f.put(0, 1))
			files, err := filepath.Glob(filepath.Join(f.cfg.Roots[0].Path, "moody", "*"))
			if err != nil || len(files) != 1 {
				t.Fatal(files, err)
			}
			spoil(f, faulty, files[0])
			r, k := f.store.roots[0], testKey(0)
			r.Lock()
			fp := chunk.Fingerprint(f.space.Digest, 0, k)
			m := entries.Mark{Slot: r.Index.Find(fp, f.space.Class(0).Base, &k), Fingerprint: fp}
			r.Unlock()
			r.drop(m, 0)
			if disk, _ := usage(t, r.Path); f.store.Stats().Roots[0].Used < disk {
				t.Errorf("%d bytes on disk, the account says %d", disk, f.store.Stats().Roots[0].Used)
			}
			faulty.Set()
			r.Orphans.Retry(t.Context())
			if disk, _ := usage(t, r.Path); disk != 0 || f.store.Stats().Roots[0].Used != 0 {
				t.Errorf("%d bytes on disk, the account says %d", disk, f.store.Stats().Roots[0].Used)
			}
		})
	}
}

// TestStoredAgainUnderAnotherName: a piece could not be unlinked, because nobody could say which of its two names it
// has. It is stored again under the other one. Both files are accounted for, and the older one goes.
func TestStoredAgainUnderAnotherName(t *testing.T) {
	f, place, faulty := moodyFixture(t, 4, 1)
	r := f.store.roots[0]
	place.fails.Store(true)
	f.mustPut(0)
	place.fails.Store(false)
	faulty.Set(faultfs.MustRules("open **moody/**: emfile")...)
	r.drop(f.markOf(0), 0)
	f.accounts("nobody can tell", 1)
	if err := f.put(0, 0); !errors.Is(err, unix.EMFILE) {
		t.Errorf("a piece is stored again while nobody knows where its older file is: %v", err)
	}
	f.accounts("it was not stored", 1)
	faulty.Set()
	f.mustPut(0)
	f.accounts("it is stored again", 2)
	f.mustRead(0)
	r.Orphans.Retry(t.Context())
	f.accounts("tried again", 1)
	f.mustRead(0)
	equal(t, "Orphaned", r.stats().Orphaned, 0)
	f.checkUsed()
}

// TestPolicyNamesAnOrphanOtherwise: when the place policy answers again it gives a piece that went meanwhile another
// name. Its bytes stay in the account until its file is found among all files, or is not. Until then the piece is not
// stored again.
func TestPolicyNamesAnOrphanOtherwise(t *testing.T) {
	for name, gone := range map[string]bool{"there": false, "gone": true} {
		t.Run(name, func(t *testing.T) {
			f, place, _ := moodyFixture(t, 4, 1)
			f.mustPut(0, 1)
			r, file, m := f.store.roots[0], f.pieceFile(0, 0), f.markOf(0)
			place.fails.Store(true)
			r.drop(m, 0)
			place.fails.Store(false)
			if gone {
				f.must(os.Remove(file))
			} else {
				place.changes.Add(1)
			}
			r.Orphans.Retry(t.Context())
			equal(t, "Orphaned", r.stats().Orphaned, pieceBytes)
			equal(t, "Used", r.stats().Used, 2*pieceBytes)
			if err := f.put(0, 0); err == nil {
				t.Error("a piece is stored again while nobody knows where its older file is")
			}
			equal(t, "Used", r.stats().Used, 2*pieceBytes)
			if g := f.space.Class(0).Place; !r.Orphans.Lost(g) || !r.renaming.doubts(r, g) {
				t.Error("nobody looks for it")
			}
			place.changes.Store(0) // else the other piece would be missing too
			f.must(r.recovery.Misplaced(t.Context(), f.space.Class(0).Place))
			f.accounts("all files were looked at", 1)
			f.mustPut(0)
			f.mustRead(0)
			f.mustRead(1)
			f.accounts("stored again", 2)
			f.checkUsed()
		})
	}
}

// TestVictimWithoutAName: no policy names the victims of a root that is full. They stay and can be read as soon as their
// policy answers, and no bytes are booked for files that nobody wants.
func TestVictimWithoutAName(t *testing.T) {
	f, place, _ := moodyFixture(t, 4, 2)
	for key := range uint64(4) {
		f.mustPut(key)
	}
	place.fails.Store(true)
	for key := range uint64(4) {
		if err := f.put(4+key, 0); !errors.Is(err, ErrNoSpace) {
			t.Error(err)
		}
	}
	place.fails.Store(false)
	st := f.store.Stats().Roots[0]
	equal(t, "Orphaned", st.Orphaned, 0)
	equal(t, "Evictions", st.Evictions, 0)
	for key := range uint64(4) {
		f.mustRead(key)
	}
	f.accounts("nothing was evicted", 8)
	f.mustPut(8)
	f.mustRead(8)
	equal(t, "Evictions", f.store.Stats().Roots[0].Evictions, 1)
	f.accounts("one was evicted", 8)
	f.checkUsed()
}

// looks goes through all files until it has seen what it waits for, and takes its turn with the upkeep, which does the same:
// of two at once one would find files gone that the other renames.
func (f *fixture) looks(until string, look func(r *root) bool) {
	f.Helper()
	r := f.store.roots[0]
	await(f, until, func() bool {
		if !r.renaming.busy.CompareAndSwap(false, true) {
			return false
		}
		defer r.renaming.busy.Store(false)
		return look(r)
	})
}

// settles gives the files of a policy in quarantine the built-in names, and checks what there is then.
func (f *fixture) settles(pieces int64) {
	f.Helper()
	g := f.space.Class(0).Place
	f.looks("all files have been looked at", func(r *root) bool {
		_, left, err := r.recovery.RenamePieces(f.Context(), g)
		return err == nil && left == 0 && !r.Orphans.Lost(g)
	})
	f.accounts("all files were looked at", pieces)
	f.checkUsed()
}

// TestPolicyChangesItsNames: a place policy gives other names than before, and a victim is the first to show it. It stays,
// like all others until they have the built-in names, and no file leaves the account.
func TestPolicyChangesItsNames(t *testing.T) {
	f, place, faulty := moodyFixture(t, 20, 1)
	for key := range uint64(20) {
		f.mustPut(key)
	}
	faulty.Set(faultfs.MustRules("publish **: eacces")...) // no file gets another name yet
	place.changes.Add(1)
	for key := range uint64(9) {
		if err := f.put(100+key, 0); !errors.Is(err, ErrNoSpace) {
			t.Error(err)
		}
		f.accounts("nothing was evicted", 20)
	}
	if !f.space.Class(0).Place.Policy.Quarantined() {
		t.Error("it still names pieces")
	}
	faulty.Set()
	f.settles(20)
	for key := range uint64(20) {
		f.mustRead(key)
	}
	f.mustPut(100)
	f.accounts("one was evicted", 20)
}

// TestPolicyChangesItsNamesBeforeADrop: an entry that cannot stay is the first to show it. Its bytes stay in the account
// until its files have gone.
func TestPolicyChangesItsNamesBeforeADrop(t *testing.T) {
	f, place, _ := moodyFixture(t, 8, 1)
	for key := range uint64(8) {
		f.mustPut(key)
	}
	r, m := f.store.roots[0], f.markOf(0)
	place.changes.Add(1)
	r.drop(m, 0)
	if disk, _ := usage(t, r.Path); r.stats().Used < disk { // somebody may have found the file already
		t.Errorf("%d bytes on disk, the account says %d", disk, r.stats().Used)
	}
	f.settles(7)
	f.mustPut(0)
	f.mustRead(0)
}

// TestFilesAreMoved: somebody gives files other names, and only victims show it. Somebody looks where the pieces are, and
// those that were missed when their entries went are unlinked.
func TestFilesAreMoved(t *testing.T) {
	f, _, _ := moodyFixture(t, 20, 1)
	dir := filepath.Join(f.cfg.Roots[0].Path, "moody")
	for key := range uint64(20) {
		f.mustPut(key)
		name := f.pieceFile(key, 0)
		f.must(os.Rename(name, filepath.Join(dir, strings.Replace(filepath.Base(name), "0_", "1_", 1))))
	}
	for key := range uint64(8) {
		f.mustPut(100 + key)
	}
	r, g := f.store.roots[0], f.space.Class(0).Place
	if disk, _ := usage(t, r.Path); disk <= r.stats().Used {
		t.Fatal("no victim was missed")
	}
	if !r.renaming.doubts(r, g) {
		t.Fatal("nobody doubts the policy")
	}
	f.looks("it names no pieces any more", func(r *root) bool {
		f.must(r.recovery.Misplaced(t.Context(), g))
		return g.Policy.Quarantined()
	})
	f.settles(20)
}

// TestScanMeetsAnOrphanWithoutAName: an entry goes while its root is scanned, and nobody can name its file. What the scan
// finds there is not taken in again: its bytes are an orphan's, and it goes.
func TestScanMeetsAnOrphanWithoutAName(t *testing.T) {
	f, place, _ := moodyFixture(t, 4, 1)
	f.mustPut(0, 1)
	g := f.reopenGated()
	if err := f.put(0, 0); !errors.Is(err, ErrResident) { // its file is found by its name
		t.Fatal(err)
	}
	r, m := f.store.roots[0], f.markOf(0)
	place.fails.Store(true)
	r.drop(m, 0)
	place.fails.Store(false)
	close(g.gate)
	<-f.store.ScanDone()
	f.accounts("scanned", 2)
	if f.has(0) {
		t.Error("an orphan is resident")
	}
	r.Orphans.Retry(t.Context())
	f.accounts("tried again", 1)
	f.mustPut(0)
	f.mustRead(0)
	f.mustRead(1)
	f.checkUsed()
}

// TestOrphanUnderThePolicysName: a piece could not be unlinked under its policy's name and was stored again under the
// built-in one. What is read and removed then is the new file, and what is accounted for is both.
func TestOrphanUnderThePolicysName(t *testing.T) {
	f, place, faulty := moodyFixture(t, 4, 1)
	f.mustPut(0)
	r, m := f.store.roots[0], f.markOf(0)
	faulty.Set(faultfs.MustRules("remove **moody/**: eacces")...)
	r.drop(m, 0)
	f.accounts("it is not unlinked", 1)
	place.fails.Store(true)
	f.mustPut(0)
	place.fails.Store(false)
	f.accounts("it is stored again", 2)
	f.mustRead(0)
	faulty.Set()
	r.drop(f.markOf(0), 0)
	f.accounts("the new file is gone", 1)
	r.Orphans.Retry(t.Context())
	f.accounts("tried again", 0)
	f.checkUsed()
}
