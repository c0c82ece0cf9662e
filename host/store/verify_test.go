package store

import (
	"fmt"
	"log/slog"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/chunk"
)

// verified says how many of n loads of a key would be verified.
func (f *fixture) verified(key uint64, n int) (verified int) {
	f.Helper()
	l := f.lookup(key)
	defer l.Release()
	for range n {
		p, err := l.Open(0, 0)
		if err != nil {
			f.Fatal(err)
		}
		if p.Verifies() {
			verified++
		}
		p.Close()
	}
	return verified
}

func verifying(v Verification, share float64) func(*Config) {
	return func(c *Config) { c.Verification, c.VerifyShare = v, share }
}

// TestVerificationOfWhatIsTrusted: under sampled and off only what this run wrote, or an orderly end vouches for, goes
// without.
func TestVerificationOfWhatIsTrusted(t *testing.T) {
	const n = 400
	for _, c := range []struct {
		v         Verification
		least, at int // of n loads of trusted pieces
	}{{Always, n, n}, {Sampled, 1, n / 2}, {Off, 0, 0}} {
		t.Run(c.v.String(), func(t *testing.T) {
			f := newFixture(t, t.TempDir(), 10, 1, verifying(c.v, 0.2))
			trusted := func(key uint64) {
				t.Helper()
				if got := f.verified(key, n); got < c.least || got > c.at {
					t.Errorf("%d of %d loads are verified, want %d to %d", got, n, c.least, c.at)
				}
			}
			f.mustPut(0)
			trusted(0)
			f.restart()
			trusted(0)
			f.restart()
			trusted(0)

			f.kill()
			f.start()
			if got := f.verified(0, n); got != n {
				t.Errorf("after a crash %d of %d loads are verified", got, n)
			}
			f.mustPut(1)
			trusted(1)
			f.cfg.Roots[0].Shared = true
			f.restart()
			if got := f.verified(1, n); got != n {
				t.Errorf("in a shared root %d of %d loads are verified", got, n)
			}
		})
	}
}

// TestNoRecyclingWithoutVerification fills a root: a victim's file is overwritten only where every load is verified.
func TestNoRecyclingWithoutVerification(t *testing.T) {
	for _, v := range []Verification{Always, Sampled, Off} {
		f := newFixture(t, t.TempDir(), 3, 1, verifying(v, 0.5))
		f.mustPut(0, 1, 2, 3, 4, 5)
		if got := f.store.Stats().Roots[0].Recycled; (got > 0) != (v == Always) {
			t.Errorf("%s: %d files recycled", v, got)
		}
	}
}

// TestSampledLosesTrust: one load that fails makes every later one verified.
func TestSampledLosesTrust(t *testing.T) {
	f := newFixture(t, t.TempDir(), 10, 1, verifying(Sampled, 0.001), func(c *Config) { c.Log = slog.New(slog.DiscardHandler) })
	f.mustPut(0, 1)
	l := f.lookup(0)
	p, err := l.Open(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	p.Bad(fmt.Errorf("extent 3: %w", chunk.ErrChecksum))
	p.Close()
	l.Release()
	if got := f.verified(1, 50); got != 50 {
		t.Errorf("%d of 50 loads are verified", got)
	}
}

// TestOutageEndsTrust: a device that was gone may have lost what it had not yet written, also of files that the run wrote
// itself. After an outage, and while the file system is read-only, every load is verified, to the end of the entry.
func TestOutageEndsTrust(t *testing.T) {
	const n = 50
	for _, state := range []RootState{RootOut, RootReadOnly} {
		t.Run(state.String(), func(t *testing.T) {
			f := newFixture(t, t.TempDir(), 10, 1, verifying(Off, 0))
			f.mustPut(0)
			if got := f.verified(0, n); got != 0 {
				t.Fatalf("%d of %d loads are verified before", got, n)
			}
			l := f.lookup(0)
			open, err := l.Open(0, 0)
			if err != nil {
				t.Fatal(err)
			}
			late, err := f.store.Put(t.Context(), f.request(1, 0, 0))
			if err == nil {
				err = write(late)
			}
			if err != nil {
				t.Fatal(err)
			}
			r := f.store.roots[0]
			if state == RootOut {
				r.takeOut("it fails", unix.EIO, "")
			} else {
				r.demote(RootReadOnly, "its file system is read-only", unix.EROFS, "")
				if got := f.verified(0, n); got != n {
					t.Errorf("%d of %d loads are verified while it is read-only", got, n)
				}
			}
			f.backIn()
			if !open.Verifies() {
				t.Error("a piece that was open is not verified")
			}
			open.Close()
			l.Release()
			if err := late.Publish(t.Context()); err != nil {
				t.Fatal(err)
			}
			f.mustPut(2)
			all := func(when string, keys ...uint64) {
				t.Helper()
				for _, k := range keys {
					if got := f.verified(k, n); got != n {
						t.Errorf("%s: %d of %d loads of key %d are verified", when, got, n, k)
					}
				}
			}
			all("back", 0, 1)
			if got := f.verified(2, n); got != 0 {
				t.Errorf("%d of %d loads of what was written since are verified", got, n)
			}
			f.restart()
			all("after a restart", 0, 1)
			if got := f.verified(2, n); got != 0 {
				t.Errorf("%d of %d loads of what was written since are verified after a restart", got, n)
			}
			f.crash() // in order, but nothing says which entries were proven
			all("after a scan", 0, 1, 2)
		})
	}
}
