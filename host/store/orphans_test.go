package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
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

// moody is a place policy that chooses a root that there is not while it fails.
type moody struct{ fails atomic.Bool }

func (m *moody) Place(q *abi.PlaceQuery, _ []abi.RootFacts, dst []byte) ([]byte, uint32) {
	if m.fails.Load() {
		return dst, 77
	}
	return fmt.Appendf(dst, "moody/%x.r%d", q.Key, q.Rank), abi.None
}
func (*moody) Unplace([]byte) abi.PathIdentity { return abi.PathIdentity{} }

// TestEvictionWithoutAName: the place policy fails while an entry goes. The bytes stay in the account until it can be
// asked again.
func TestEvictionWithoutAName(t *testing.T) {
	place := &moody{}
	f := newFixture(t, t.TempDir(), 2, 1, func(c *Config) {
		c.Policies.Place = handle(policy.NativeModule("moody", []abi.Role{abi.RolePlace}, func(guest.Info) (any, error) {
			return place, nil
		}))
	})
	f.mustPut(0, 1)
	r, k := f.store.roots[0], testKey(0)
	r.Lock()
	fp := chunk.Fingerprint(f.space.Digest, 0, k)
	m := entries.Mark{Slot: r.Index.Find(fp, f.space.Class(0).Base, &k), Fingerprint: fp}
	r.Unlock()
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

// TestStoredAgainWhileStray: a key is stored again before its old file could be removed. The put takes what stands
// there, or the name once it is free, and the orphan is gone: what is promised now is not unlinked.
func TestStoredAgainWhileStray(t *testing.T) {
	for name, gone := range map[string]bool{"there": false, "gone": true} {
		t.Run("unnamed and "+name, func(t *testing.T) {
			place := &moody{}
			f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) {
				c.Policies.Place = handle(policy.NativeModule("moody", []abi.Role{abi.RolePlace}, func(guest.Info) (any, error) {
					return place, nil
				}))
			})
			f.mustPut(0, 1)
			place.fails.Store(true)
			f.store.roots[0].drop(f.markOf(0), 0)
			place.fails.Store(false)
			f.storedAgain(gone)
		})
		t.Run("named and "+name, func(t *testing.T) {
			f, faulty := faultyFixture(t, 4)
			f.mustPut(0, 1)
			faulty.Set(faultfs.MustRules("remove **: eacces")...)
			f.store.roots[0].drop(f.markOf(0), 0)
			faulty.Set()
			f.storedAgain(gone)
		})
	}
	t.Run("and the put fails", func(t *testing.T) {
		f, faulty := faultyFixture(t, 4)
		f.mustPut(0, 1)
		faulty.Set(faultfs.MustRules("remove **: eacces\npublish **: eperm")...)
		f.store.roots[0].drop(f.markOf(0), 0)
		if err := f.put(0, 0); !errors.Is(err, unix.EPERM) {
			t.Error(err)
		}
		faulty.Set()
		f.store.roots[0].Orphans.Retry(context.Background())
		f.checkUsed()
	})
}

func (f *fixture) storedAgain(gone bool) {
	f.Helper()
	r := f.store.roots[0]
	if got := r.stats().Orphaned; got != pieceBytes {
		f.Fatalf("%d bytes of orphans", got)
	}
	if gone {
		if err := os.Remove(f.pieceFile(0, 0)); err != nil {
			f.Fatal(err)
		}
	}
	f.mustPut(0)
	if st := r.stats(); st.Orphaned != 0 || st.Used != 2*pieceBytes {
		f.Errorf("%+v", st)
	}
	r.Orphans.Retry(context.Background())
	f.mustRead(0)
	f.checkUsed()
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
			place, faulty := &moody{}, faultfs.New(staging.OS())
			f := newFixture(t, t.TempDir(), 2, 2, func(c *Config) {
				c.FS, c.UpkeepEvery = faulty, time.Hour
				c.Policies.Place = handle(policy.NativeModule("moody", []abi.Role{abi.RolePlace}, func(guest.Info) (any, error) {
					return place, nil
				}))
			})
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

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// TestPublishBesideADeletion: the unlinking of one orphan hangs. Other keys are published meanwhile, and scanned files
// judged; the orphan's own key waits, so that its piece is not unlinked.
func TestPublishBesideADeletion(t *testing.T) {
	f, faulty := faultyFixture(t, 8, func(c *Config) { c.IOTimeout, c.UpkeepEvery = -1, time.Hour })
	f.mustPut(0, 1)
	r := f.store.roots[0]
	faulty.Set(faultfs.MustRules("remove **: eacces")...)
	r.drop(f.markOf(0), 0)
	faulty.Set(faultfs.MustRules("remove **: hang")...)
	release := sync.OnceFunc(faulty.Release)
	defer release()
	var deleting sync.WaitGroup
	deleting.Go(func() { r.Orphans.Retry(context.Background()) })
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	f.must(faulty.AwaitHanging(ctx, 1))

	other, same := make(chan error, 1), make(chan error, 1)
	go func() { other <- f.put(2, 0) }()
	select {
	case err := <-other:
		f.must(err)
	case <-ctx.Done():
		t.Fatal("a publication waited for another file's unlinking")
	}
	if !r.Orphans.Has(f.pieceFile(0, 0)) || r.Orphans.Has(f.pieceFile(1, 0)) {
		t.Error("the file that is being unlinked is not an orphan, or another is")
	}
	go func() { same <- f.put(0, 0) }()
	release()
	f.must(<-same)
	deleting.Wait()
	f.mustRead(0)
	f.mustRead(2)
	f.checkUsed()
}

// TestStraysGo: what would not be unlinked is tried again, and its bytes are free then.
func TestStraysGo(t *testing.T) {
	f, faulty := faultyFixture(t, 4, func(c *Config) { c.QuarantineFiles = -1 })
	f.unlinkVictims()
	f.mustPut(0, 1, 2, 3)
	faulty.Set(faultfs.MustRules("remove **: eacces\nstat **.kv: eacces")...)
	if err := f.put(4, 0); !errors.Is(err, ErrNoSpace) {
		t.Error(err)
	}
	if got := f.store.Stats().Roots[0]; got.Orphaned != pieceBytes {
		t.Errorf("%d bytes of orphans, and nobody could say that the file is gone", got.Orphaned)
	}
	faulty.Set()
	f.store.roots[0].Orphans.Retry(context.Background())
	if got := f.store.Stats().Roots[0]; got.Orphaned != 0 || got.Used != 3*pieceBytes {
		t.Errorf("%+v", got)
	}
	f.checkUsed()

	// One that is stored again is no orphan any more.
	faulty.Set(faultfs.MustRules("remove **: eacces")...)
	l := f.lookup(1)
	p, err := l.Open(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	p.Bad(errors.New("on purpose"))
	p.Close()
	l.Release()
	faulty.Set()
	f.mustPut(1)
	f.store.roots[0].Orphans.Retry(context.Background())
	f.mustRead(1)
	if got := f.store.Stats().Roots[0]; got.Orphaned != 0 {
		t.Errorf("%+v", got)
	}
	f.checkUsed()
}
