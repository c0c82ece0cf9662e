package store

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/fsck"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

var (
	onlyTrees = flag.String("hostile.only", "", "run the cases whose name contains this")
	allTrees  = flag.Bool("hostile.all", false, "run every case, not one in six")
)

const (
	planted  = 4 // pieces that are in the root when the intruder comes
	treeRoom = 6 // pieces that the root has room for
	// foreign is what an intruder takes itself, where it is no piece and in no account.
	foreign = 8192 + pieceBytes
)

// inTree is a store on a root of a tree.
func inTree(t *testing.T, dir string) *fixture {
	return newFixture(t, dir, treeRoom, 1, func(c *Config) {
		c.HostID, c.ScanWorkers, c.ScanWait, c.UpkeepEvery, c.Now = treeHost, 1, time.Minute, time.Hour, nil
		c.Roots[0].MaxEntries = 0
	})
}

// loads reads a key's piece as a load does; false is a miss.
func (f *fixture) loads(n uint64) bool {
	f.Helper()
	l := f.lookup(n)
	defer l.Release()
	if l.Hits() == 0 {
		return false
	}
	p, err := l.Open(0, 0)
	if err != nil {
		return false
	}
	defer p.Close()
	image := make([]byte, pieceBytes)
	got, err := p.File().ReadAt(image, 0)
	if err == io.EOF {
		err = nil
	}
	var head *Head
	if err == nil {
		head, err = p.Verify(image[:got])
	}
	if err == nil {
		err = kv.VerifyExtents(head.Plan, 0, len(head.Plan.Extents()), image[head.DataOffset:got], 0, head.Table)
	}
	if err != nil {
		p.Bad(err)
		return false
	}
	if want := payload(head.Plan, testKey(n), 0); !bytes.Equal(image[head.DataOffset:][:len(want)], want) {
		f.Errorf("key %d: wrong bytes", n)
	}
	return true
}

// used adds up what files of a root take, each once: pieces, temporaries and quarantine.
func used(t testing.TB, dir string) (bytes int64) {
	t.Helper()
	seen := map[uint64]bool{}
	err := filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, name)
		if e.IsDir() || !e.Type().IsRegular() || strings.HasPrefix(rel, ".") && !strings.HasPrefix(rel, pieceformat.QuarantineDir) {
			return nil
		}
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil {
			return err
		}
		if !seen[st.Ino] {
			seen[st.Ino] = true
			bytes += st.Blocks * 512
		}
		return nil
	})
	must(t, err)
	return bytes
}

// seedling is a root that intruders come to, as it is after a clean end and after a kill.
type seedling struct {
	clean, killed string
	tree          tree
	piece         []byte
	paths         [planted]string // below the root
}

func newSeedling(t *testing.T) *seedling {
	s := &seedling{clean: filepath.Join(t.TempDir(), "clean"), killed: filepath.Join(t.TempDir(), "killed")}
	f := inTree(t, s.clean)
	path := func(n uint64) string {
		must(t, f.putUnder(n, n, 0))
		rel, err := filepath.Rel(s.clean, f.pieceFile(n, 0))
		must(t, err)
		return rel
	}
	for n := range s.paths {
		s.paths[n] = path(uint64(n))
	}
	s.tree = tree{
		Piece: s.paths[0], Free: path(planted), Text: f.ns.Digest().String(), Plan: f.space.Plan(0).Digest().String(),
	}
	_, err := f.store.Discard(DiscardRequest{Namespace: f.space, Keys: keys(planted)})
	must(t, err)
	must(t, os.CopyFS(s.killed, os.DirFS(s.clean)))
	must(t, f.store.Close())
	s.piece, err = os.ReadFile(filepath.Join(s.clean, s.tree.Piece))
	must(t, err)
	return s
}

// lost says which keys an intruder takes away with a place.
func (s *seedling) lost(p place) (lost [planted]bool) {
	for n, path := range s.paths {
		lost[n] = path == p.Path || strings.HasPrefix(path, p.Path+"/")
	}
	return lost
}

// TestTrees lets every intruder take every place, before a start and under a running host. What is outside is neither
// served nor changed nor removed; the host starts, serves what it has, stores and evicts within its capacity, and does
// not take its root out of service. fsck comes to an end.
func TestTrees(t *testing.T) {
	s := newSeedling(t)
	for i, p := range s.tree.places() {
		for j, in := range intruders() {
			name := in.Name + " for " + p.Name
			if !strings.Contains(name, *onlyTrees) || !*allTrees && *onlyTrees == "" && (i+5*j)%6 != 0 {
				continue
			}
			for when, how := range []string{", after a clean end", ", after a kill", ", beside the host"} {
				if *allTrees || *onlyTrees != "" || i < 2 || when == (i+j)%3 {
					t.Run(name+how, func(t *testing.T) { s.run(t, p, in, when) })
				}
			}
		}
	}
}

// run has an intruder come before a start that finds a checkpoint, before one that scans, or to a running host.
func (s *seedling) run(t *testing.T, p place, in intruder, when int) {
	top := t.TempDir()
	tree := s.tree
	tree.Root, tree.Outside = filepath.Join(top, "root"), filepath.Join(top, "outside")
	from := s.clean
	if when == 1 {
		from = s.killed
	}
	must(t, errors.Join(os.CopyFS(tree.Root, os.DirFS(from)), tree.makeOutside(s.piece)))
	come := func() {
		err := tree.Put(p, in)
		if errors.Is(err, unix.EPERM) {
			testenv.Need(t, testenv.Devices)
		}
		must(t, err)
	}
	var f *fixture
	if when == 2 {
		f = inTree(t, tree.Root)
	}
	come()
	before := faultfs.SumTree(t, tree.Outside)
	check := func(repair bool) {
		if _, err := fsck.Check(t.Context(), tree.Root, fsck.Options{Repair: repair, Workers: 1}); err != nil {
			t.Logf("fsck: %v", err)
		}
	}
	if when != 2 {
		check(false)
		f = inTree(t, tree.Root)
	}
	lost := s.lost(p)
	for n := range uint64(planted) {
		if hit := f.loads(n); !hit && !lost[n] {
			t.Errorf("key %d is lost", n)
		}
	}
	for n := uint64(planted); n < 3*planted; n++ {
		if err := f.putUnder(n, n, 0); err != nil {
			t.Errorf("store of key %d: %v", n, err)
		} else if !f.loads(n) {
			t.Errorf("key %d is not there after it was stored", n)
		}
		if bytes := used(t, tree.Root); bytes > treeRoom*pieceBytes+foreign {
			t.Errorf("%d bytes of %d after key %d", bytes, f.cfg.Roots[0].Capacity, n)
		}
	}
	if st := f.store.Stats().Roots[0]; st.State != health.In || st.Outages != 0 {
		t.Errorf("the root is %s after %d outages: %s", st.State, st.Outages, st.Reason)
	}
	f.restart()
	if !f.loads(3*planted - 1) {
		t.Errorf("the last key is lost with a start")
	}
	noError(t, f.store.Close())
	check(true)
	if after := faultfs.SumTree(t, tree.Outside); after != before {
		t.Errorf("outside is\n%s\nwas\n%s", after, before)
	}
}
