package store

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/moves"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// Ranks of one entry that stand under names of several policies, at a start with whatever policy.

// ordered is a file system that lists directories in the order of their names, or the other way round.
type ordered struct {
	staging.FS
	back bool
}

func (o ordered) ReadDir(name string) ([]fs.DirEntry, error) {
	list, err := o.FS.ReadDir(name)
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b fs.DirEntry) int { return cmp.Compare(a.Name(), b.Name()) })
	if o.back {
		slices.Reverse(list)
	}
	return list, err
}

// inOrder has scans meet files in one order, or the other.
func inOrder(back bool) func(*Config) {
	return func(c *Config) {
		c.FS, c.ScanWorkers = ordered{staging.OS(), back}, 1
	}
}

// numbers are those of the keys of these tests.
var numbers = func() map[chunk.Key]uint64 {
	m := map[chunk.Key]uint64{}
	for n := range uint64(300) {
		m[testKey(n)] = n
	}
	return m
}()

// named is a linked-in place policy.
func named(name func(n uint64, rank uint32) string) *policy.Handle {
	return linkedPlacer(func(q *abi.PlaceQuery, dst []byte) []byte {
		return append(dst, name(numbers[q.Key], q.Rank)...)
	}).use("named")
}

func widths(t *testing.T, w string) *policy.Handle {
	return use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: w})
}

// TestAPolicyWithoutANameForAPiece: the ranks of an entry have the built-in name and an earlier policy's, and the policy
// of this run has none for either. The entry is a hit, whichever file the scan meets first.
func TestAPolicyWithoutANameForAPiece(t *testing.T) {
	for _, back := range []bool{false, true} {
		t.Run(fmt.Sprintf("back=%t", back), func(t *testing.T) {
			f := newFixture(t, t.TempDir(), 6, 2, inOrder(back))
			f.must(f.put(0, 0))
			f.cfg.Policies.Place = widths(t, "1/1/1")
			f.crash()
			f.must(f.put(0, 1))
			f.mustRead(0)
			f.cfg.Policies.Place = named(func(uint64, uint32) string { return "../../out.kv" })
			f.crash()
			f.mustRead(0)
			f.checkUsed()
			equal(t, "Orphaned", f.store.Stats().Roots[0].Orphaned, 0)
		})
	}
}

// Keys of TestRanksUnderSeveralNamings. The first are of entries with a pair of names each.
const (
	inTheWay  = 100 // and above: an entry for each of those, whose names can be in their way
	ofEarlier = 198
	ofLater   = 199
)

// TestRanksUnderSeveralNamings has an entry for each pair of names that its two ranks can have: today's policy's, the
// built-in one, those of two earlier policies, and one that nobody gives any more. Today's policy may have no name for
// these entries, or one that something else has. In whatever order the scan meets the files, all entries are hits, after
// a start from the checkpoint too, and under the next policy, and the account is the disk's.
func TestRanksUnderSeveralNamings(t *testing.T) {
	type piece struct {
		n    uint64
		rank uint32
	}
	const (
		today = iota
		builtin
		earlier
		later
		nobody
		namings
	)
	names := map[piece]*[namings]string{}
	images := map[piece][]byte{}
	template := newFixture(t, t.TempDir(), 2*namings*namings+2, 2, inOrder(false),
		func(c *Config) { c.Policies.Place = widths(t, "1/1/1") })
	root := template.cfg.Roots[0].Path
	each := func(visit func(p piece)) {
		for n := range uint64(namings * namings) {
			for rank := range uint32(2) {
				visit(piece{n, rank})
				visit(piece{inTheWay + n, rank})
			}
		}
	}
	note := func(naming int) {
		each(func(p piece) {
			rel, err := filepath.Rel(root, template.pieceFile(p.n, p.rank))
			template.must(err)
			if names[p] == nil {
				names[p] = &[namings]string{nobody: fmt.Sprintf("lost/%d_r%d", p.n, p.rank)}
			}
			names[p][naming] = rel
		})
	}
	note(earlier)
	template.mustPut(ofEarlier) // so that its policy is kept
	template.cfg.Policies.Place = widths(t, "4/4")
	template.restart()
	note(later)
	template.mustPut(ofLater)
	template.cfg.Policies.Place = nil
	template.restart()
	note(builtin)
	each(func(p piece) {
		template.must(template.put(p.n, p.rank))
		b, err := os.ReadFile(template.pieceFile(p.n, p.rank))
		template.must(err)
		images[p] = b
		template.must(os.Remove(template.pieceFile(p.n, p.rank)))
	})
	template.must(template.store.Close())
	template.must(os.Remove(filepath.Join(root, pieceformat.CheckpointFile)))

	own := func(n uint64, rank uint32) string { return fmt.Sprintf("own/%d_r%d", n, rank) }
	// clashes has names for entries in the way, and those of the pairs are pair's.
	clashes := func(pair, other func(n uint64, rank uint32) string) func(n uint64, rank uint32) string {
		return func(n uint64, rank uint32) string {
			if n < inTheWay {
				return pair(n, rank)
			}
			return other(n-inTheWay, rank)
		}
	}
	below := func(n uint64, rank uint32) string { return own(n, rank) + "/piece" }
	for what, bound := range map[string]struct {
		open  func(t *testing.T) *policy.Handle
		name  func(n uint64, rank uint32) string // of a linked-in one
		today int                                // the name of a pair's piece that is today's
	}{
		"the built-in one": {open: func(*testing.T) *policy.Handle { return nil }, today: builtin},
		"the earlier one":  {open: func(t *testing.T) *policy.Handle { return widths(t, "1/1/1") }, today: earlier},
		"another":          {name: own, today: today},
		"without names": {
			name: clashes(func(uint64, uint32) string { return "../../out.kv" }, own), today: builtin,
		},
		"with others' names":        {name: clashes(own, own), today: builtin},
		"with names of directories": {name: clashes(own, below), today: builtin},
		"with names through files":  {name: clashes(below, own), today: builtin},
	} {
		for _, back := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/back=%t", what, back), func(t *testing.T) {
				dir := t.TempDir()
				if err := os.CopyFS(dir, os.DirFS(root)); err != nil {
					t.Fatal(err)
				}
				each(func(p piece) {
					naming := today
					if p.n < inTheWay {
						naming = [2]int{int(p.n) / namings, int(p.n) % namings}[p.rank]
					}
					if naming == today && (p.n < inTheWay || bound.name == nil) {
						naming = bound.today
					}
					rel := names[p][naming]
					if naming == today {
						rel = bound.name(p.n, p.rank)
					}
					put(t, filepath.Join(dir, rel), images[p])
				})
				f := newFixture(t, dir, 2*namings*namings+2, 2, inOrder(back), func(c *Config) {
					if c.Policies.Place = named(bound.name); bound.open != nil {
						c.Policies.Place = bound.open(t)
					}
				})
				holds := func(when string) {
					t.Helper()
					each(func(p piece) {
						if p.rank == 0 && !f.has(p.n) {
							t.Errorf("%s: key %d is a miss", when, p.n)
						}
					})
					if !t.Failed() {
						each(func(p piece) { f.mustRead(p.n) })
					}
					f.checkUsed()
					equal(t, when+": Orphaned", f.store.Stats().Roots[0].Orphaned, 0)
				}
				holds("after a scan")
				f.restart()
				holds("after a restart")
				f.cfg.Policies.Place = nil
				f.crash()
				holds("under the next policy")
			})
		}
	}
}

// TestPutDuringAScanOfAnEarlierNaming: a client stores what a scan has not come to, or it is copied from another level.
// Its files have an earlier policy's name, or one rank has that name and the other the built-in one. The put finds them,
// and nothing is there twice.
func TestPutDuringAScanOfAnEarlierNaming(t *testing.T) {
	for _, c := range []struct{ first, what string }{{"1/1/1", "put"}, {"", "put"}, {"1/1/1", "copy"}} {
		t.Run(c.what+" "+c.first, func(t *testing.T) {
			f := newFixture(t, t.TempDir(), 6, 2, inOrder(false), func(cfg *Config) {
				if c.first != "" {
					cfg.Policies.Place = widths(t, c.first)
				}
			})
			f.must(f.put(0, 0))
			f.cfg.Policies.Place = widths(t, "1/1/1")
			f.crash()
			f.must(f.put(0, 1))
			f.cfg.Policies.Place = widths(t, "4/4")
			g := f.reopenGated()
			open := sync.OnceFunc(func() { close(g.gate) })
			defer open()
			var puts []*Put
			for rank := range uint32(2) {
				q := f.request(0, 0, rank)
				if c.what == "copy" {
					h := &pieceformat.Header{Plan: f.space.Plan(0).Digest()}
					q.copy = &copyOf{entry: &moves.Entry{Namespace: f.space}, header: h, level: f.store.levels[0]}
				}
				p, err := f.store.Put(t.Context(), q)
				if !errors.Is(err, ErrResident) {
					t.Errorf("rank %d is stored again: %v", rank, err)
				}
				if err == nil {
					f.must(write(p))
					puts = append(puts, p)
				}
			}
			open()
			<-f.store.ScanDone()
			for _, p := range puts {
				f.must(p.Publish(t.Context()))
			}
			f.mustRead(0)
			f.checkUsed()
			equal(t, "files", len(f.files()), 2)
		})
	}
}

// TestRenameInDoubt: the scan gives a piece that nobody has named another name, and is told that it failed. Where it
// happened all the same the piece is an entry's, else it is left until the next start; its bytes are in the account.
func TestRenameInDoubt(t *testing.T) {
	for fault, hit := range map[string]bool{"eio": false, "eio after": true} {
		t.Run(fault, func(t *testing.T) {
			faulty := faultfs.New(ordered{staging.OS(), true})
			f := newFixture(t, t.TempDir(), 6, 1, inOrder(true), func(c *Config) { c.FS = faulty })
			f.mustPut(0)
			b, err := os.ReadFile(f.pieceFile(0, 0))
			f.must(err)
			f.must(os.Remove(f.pieceFile(0, 0)))
			put(t, filepath.Join(f.cfg.Roots[0].Path, "zz", "z.kv"), b) // the scan comes to it last
			faulty.Set(faultfs.MustRules("publish ** : " + fault)...)
			f.crash()
			faulty.Set()
			equal(t, "it is a hit", f.has(0), hit)
			f.checkUsed()
			f.restart()
			f.mustRead(0)
			f.checkUsed()
		})
	}
}
