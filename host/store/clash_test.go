package store

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/plugins/fanout"
)

// TestPiecesUnderTwoNamings leaves what crashes around a swap of the place policy can leave: an entry with pieces that
// two namings named, and a piece under both names. All is served, and the account is the disk's.
func TestPiecesUnderTwoNamings(t *testing.T) {
	flat := func() *policy.Handle { return use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"}) }
	deep := func() *policy.Handle { return use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"}) }
	for name, after := range map[string]func() *policy.Handle{
		"the later one acts": deep, "the earlier one acts": flat, "neither acts": func() *policy.Handle { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, t.TempDir(), 6, 2, func(c *Config) {
				c.Policies.Place = flat()
			})
			f.mustPut(0, 1, 2)
			was := map[uint64][2]string{}
			for n := range uint64(3) {
				was[n] = [2]string{f.pieceFile(n, 0), f.pieceFile(n, 1)}
			}
			if _, err := f.store.Swap(t.Context(),
				Swap{From: "fanout", Policies: [abi.Roles]*policy.Handle{abi.RolePlace: deep()}}); err != nil {
				t.Fatal(err)
			}
			f.mustPut(3)
			again := func(n uint64, rank uint32, do func(from, to string) error) {
				t.Helper()
				to := f.pieceFile(n, rank)
				if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := do(was[n][rank], to); err != nil {
					t.Fatal(err)
				}
			}
			again(0, 1, os.Rename)
			for rank := range uint32(2) {
				again(1, rank, func(from, to string) error {
					b, err := os.ReadFile(from)
					if err != nil {
						return err
					}
					return os.WriteFile(to, b, 0o600)
				})
			}
			f.cfg.Policies.Place = after()
			f.crash()
			for n := range uint64(4) {
				f.mustRead(n)
			}
			if list := f.files(); len(list) != 8 {
				t.Errorf("%d files of 4 entries with 2 pieces: %v", len(list), list)
			}
			f.checkUsed()
			f.cfg.Policies.Place = after()
			f.restart()
			for n := range uint64(4) {
				f.mustRead(n)
			}
			f.checkUsed()
		})
	}
}

// linkedPlacer is a place policy that is linked in, so that the next start cannot open it again. Its paths lead
// nowhere.
type linkedPlacer func(q *abi.PlaceQuery, dst []byte) []byte

func (p linkedPlacer) Place(q *abi.PlaceQuery, _ []abi.RootFacts, dst []byte) ([]byte, uint32) {
	return p(q, dst), abi.None
}

func (linkedPlacer) Unplace([]byte) abi.PathIdentity { return abi.PathIdentity{} }

func (p linkedPlacer) use(name string) *policy.Handle {
	return handle(policy.NativeModule(name, []abi.Role{abi.RolePlace}, func(guest.Info) (any, error) { return p, nil }))
}

// TestAFileTakenOverHoldsAnother: a power failure has undone what was written to a file that a put had taken over, and not
// its name, so that a piece stands under another key's name. It also stands, stored again, where an earlier place policy
// named it. The scan renames the first, in either order, and keeps one of the two.
func TestAFileTakenOverHoldsAnother(t *testing.T) {
	for _, dir := range []string{"0", "z"} {
		t.Run(dir, func(t *testing.T) {
			f := newFixture(t, t.TempDir(), 6, 1, func(c *Config) {
				c.ScanWorkers = 1
				c.Policies.Place = use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"})
			})
			f.mustPut(0)
			image, err := os.ReadFile(f.pieceFile(0, 0))
			if err != nil {
				t.Fatal(err)
			}
			put(t, filepath.Join(f.cfg.Roots[0].Path, dir, "other.kv"), image)
			f.cfg.Policies.Place = nil
			f.crash()
			f.mustRead(0)
			if list := f.files(); len(list) != 1 {
				t.Errorf("the files of one piece: %v", list)
			}
			f.checkUsed()
		})
	}
}

// TestCheckpointOfAnotherLinkedPolicy starts, after an orderly end, with another linked-in place policy that the
// operator gave the same name. A file that the earlier one named is not taken for one of the later one's: a scan finds
// it.
func TestCheckpointOfAnotherLinkedPolicy(t *testing.T) {
	under := func(dir string) *policy.Handle {
		p := linkedPlacer(func(q *abi.PlaceQuery, dst []byte) []byte {
			return fmt.Appendf(dst, "%s/%x_r%d.kv", dir, q.Key, q.Rank)
		})
		h := p.use(dir)
		h.Label = "place"
		return h
	}
	f := newFixture(t, t.TempDir(), 40, 2, func(c *Config) { c.Policies.Place = under("heap") })
	f.must(f.put(0, 0)) // entries that lack a piece are not compared with the disk
	swap := Swap{From: "place"}
	swap.Policies[abi.RolePlace] = under("pile")
	if _, err := f.store.Swap(t.Context(), swap); err != nil {
		t.Fatal(err)
	}
	f.mustPut(1, 2)
	f.cfg.Policies.Place = under("pile")
	f.restart()
	st := f.store.Stats().Roots[0]
	equal(t, "Scanned", st.Scanned, 5)
	equal(t, "Renamed", st.Renamed, 1)
	f.must(f.put(0, 1))
	for n := range uint64(3) {
		f.mustRead(n)
	}
	f.checkUsed()
}

// TestRescanUnderALaterNaming scans a shared root again after its start, as a host does that was given up: what an
// earlier place policy named is known all the same, and is in the account once.
func TestRescanUnderALaterNaming(t *testing.T) {
	dir := t.TempDir()
	flat := func(c *Config) {
		c.Policies.Place = use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"})
	}
	deep := func(c *Config) {
		c.Policies.Place = use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"})
	}
	f := fellow(t, dir, "a", 60, patient, flat)
	f.mustPut(0, 1, 2)
	if err := f.store.Close(); err != nil {
		t.Fatal(err)
	}
	f = fellow(t, dir, "a", 60, patient, deep)
	f.mustPut(3)
	for n := range uint64(4) {
		f.mustRead(n)
	}
	if err := f.store.roots[0].custody.(*sharedRoot).Rescan(t.Context()); err != nil {
		t.Fatal(err)
	}
	for n := range uint64(4) {
		f.mustRead(n)
	}
	if used, disk := f.store.Stats().Roots[0].Used, onDisk(t, dir); used != disk {
		t.Errorf("the account says %d bytes, the disk %d", used, disk)
	}
	if err := f.store.roots[0].check(); err != nil {
		t.Error(err)
	}
}

// TestFoundUnderAnEarlierNaming: a scan finds the pieces of an earlier place policy when a session has the namespace
// open already. They are read as any other.
func TestFoundUnderAnEarlierNaming(t *testing.T) {
	f := newFixture(t, t.TempDir(), 6, 2, func(c *Config) {
		c.Policies.Place = use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"})
	})
	f.mustPut(0, 1)
	f.cfg.Policies.Place = use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"})
	g := f.reopenGated()
	close(g.gate)
	<-f.store.ScanDone()
	f.mustRead(0)
	f.mustRead(1)
	f.checkUsed()
}

// TestANamingBoundTwice: the root keeps a place policy for the files that it named, also when it was bound again, named
// none, and went.
func TestANamingBoundTwice(t *testing.T) {
	naming := func(widths string) *policy.Handle {
		return use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: widths})
	}
	f := newFixture(t, t.TempDir(), 6, 2, func(c *Config) { c.Policies.Place = naming("1/1/1") })
	f.mustPut(0)
	for _, widths := range []string{"4/4", "1/1/1", "4/4"} {
		if _, err := f.store.Swap(t.Context(),
			Swap{From: "fanout", Policies: [abi.Roles]*policy.Handle{abi.RolePlace: naming(widths)}}); err != nil {
			t.Fatal(err)
		}
	}
	f.store.catalog.EndScan() // frees what has ended
	kept, err := filepath.Glob(filepath.Join(f.cfg.Roots[0].Path, pieceformat.PoliciesDir, "*"+pieceformat.PlaceSuffix))
	if err != nil || len(kept) != 2 {
		t.Errorf("%d place policies are kept, of two that are needed: %v, %v", len(kept), kept, err)
	}
}
