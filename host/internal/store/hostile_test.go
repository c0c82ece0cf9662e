package store

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/fsck"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
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
	return newFixtureIn(t, dir, treeRoom, 1, func(c *Config) {
		c.HostID, c.ScanWorkers, c.ScanWait, c.UpkeepEvery, c.Now = treeHost, 1, time.Minute, time.Hour, nil
		c.Roots[0].MaxEntries = 0
	})
}

// TestFileLongerThanAnyPiece: it is refused as it is opened, since who reads a piece makes room for all of it first.
func TestFileLongerThanAnyPiece(t *testing.T) {
	f := newFixture(t, 8, 1)
	f.mustPut(0, 1)
	must(t, os.Truncate(f.pieceFile(0, 0), 1<<40))
	l := f.lookup(0)
	defer l.Release()
	if p, err := l.Open(0, 0); err == nil {
		t.Errorf("a file of 1 TiB was opened as a piece of %d bytes, want %v", p.Size(), pieceformat.ErrDamaged)
		p.Close()
	} else if !errors.Is(err, pieceformat.ErrDamaged) {
		t.Errorf("open a file of 1 TiB: %v, want %v", err, pieceformat.ErrDamaged)
	}
	f.mustRead(1)
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
	s := &seedling{clean: filepath.Join(testenv.Dir(t), "clean"), killed: filepath.Join(t.TempDir(), "killed")}
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
	testenv.Slow(t)
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
	top := testenv.Dir(t)
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

// tree is a root with pieces, next to a directory that nothing in the root may reach. It is as an attacker makes it who can
// write into a root and wants the host to serve, change or remove a file that is outside, or to stop: every intruder in every
// place. Trees are made by construction, so that a new place or a new intruder meets all of the other kind.
type tree struct {
	Root    string
	Outside string // see [makeOutside]
	Piece   string // of the root: a piece, as a path below it
	Free    string // the name of a piece that is not there
	Text    string // digest of the namespace
	Plan    string // digest of the plan
}

// place is a name in a root.
type place struct {
	Name string
	Path string // below the root
}

// places are the names that intruders take.
func (t *tree) places() []place {
	places := []place{
		{"a piece", t.Piece},
		{"the name of a piece to come", t.Free},
		{"the directory of a piece", filepath.Dir(t.Piece)},
		{"the directory of a namespace", strings.SplitN(t.Piece, "/", 2)[0]},
		{"a directory between", filepath.Dir(filepath.Dir(t.Piece))},
		{"a name at the top", "stray"},
		{"a name that sorts first", "!"},
		{"a name of 255 bytes", strings.Repeat("n", 255)},
		{"a hidden name", ".hidden"},
		{"a temporary of this host", pieceformat.TempName(t.Piece, treeHost, 7)},
		{"a temporary of another", pieceformat.TempName(t.Piece, "other", 7)},
		{"a temporary beside the lock", pieceformat.TempName(pieceformat.LockFile, treeHost, 8)},
		{"a quarantined file", pieceformat.QuarantineName(1, 1, "x.kv")},
		{"a repaired file", pieceformat.QuarantineDir + "/0000000000000001-repair-x.kv"},
		{"the probe's lock", pieceformat.MetaDir + "/probe.lock"},
		{"the lock", pieceformat.LockFile},
		{"the shared tree", pieceformat.MetaDir + "/shared"},
		{"the store's directory", pieceformat.MetaDir},
		{"the copies' directory", pieceformat.CopyDir},
	}
	for _, file := range pieceformat.RootFiles {
		places = append(places, place{file, file})
	}
	for _, dir := range pieceformat.RootDirs[1:] {
		places = append(places, place{dir, dir})
	}
	for _, dir := range pieceformat.Copies(pieceformat.NamespacesDir) {
		places = append(places, place{"a text in " + dir, dir + "/" + t.Text}, place{"another text in " + dir, dir + "/" + strings.Repeat("cd", 16)})
	}
	for _, dir := range pieceformat.Copies(pieceformat.PlansDir) {
		places = append(places, place{"a plan in " + dir, dir + "/" + t.Plan})
	}
	return places
}

// treeHost is the id of the host that the trees are made for.
const treeHost = "hostilehost"

// intruder is something that takes a name.
type intruder struct {
	Name string
	// Make makes it under a name of the tree. The error is unix.EPERM where this user may not.
	Make func(t *tree, name string) error
}

func link(to func(t *tree, name string) string) func(*tree, string) error {
	return func(t *tree, name string) error { return os.Symlink(to(t, name), name) }
}

func outside(rel string) func(*tree, string) error {
	return link(func(t *tree, _ string) string { return filepath.Join(t.Outside, rel) })
}

func device(kind, major, minor uint32) func(*tree, string) error {
	return func(_ *tree, name string) error {
		return unix.Mknod(name, kind|0o600, int(unix.Mkdev(major, minor)))
	}
}

// intruders are all kinds.
func intruders() []intruder {
	return []intruder{
		{"a link to a file outside", outside("file")},
		{"a link to a piece outside", outside("piece.kv")},
		{"a link to a directory outside", outside("dir")},
		{"a link to a pipe outside", outside("pipe")},
		{"a link to nothing outside", outside("dir/unmade")},
		{"a relative link outside", link(func(t *tree, name string) string {
			rel, _ := filepath.Rel(filepath.Dir(name), filepath.Join(t.Outside, "piece.kv"))
			return rel
		})},
		{"a link to itself", link(func(_ *tree, name string) string { return filepath.Base(name) })},
		{"a link to the root", link(func(t *tree, _ string) string { return t.Root })},
		{"a link to a descriptor", link(func(*tree, string) string { return "/proc/self/fd/0" })},
		{"a link to the host's memory", link(func(*tree, string) string { return "/proc/self/mem" })},
		{"a second name of a file outside", func(t *tree, name string) error {
			return os.Link(filepath.Join(t.Outside, "file"), name)
		}},
		{"a second name of a piece outside", func(t *tree, name string) error {
			return os.Link(filepath.Join(t.Outside, "piece.kv"), name)
		}},
		{"a pipe", func(_ *tree, name string) error { return unix.Mkfifo(name, 0o600) }},
		{"a socket", func(_ *tree, name string) error { return unix.Mknod(name, unix.S_IFSOCK|0o600, 0) }},
		{"a device without end", device(unix.S_IFCHR, 1, 5)},
		{"a device that is not there", device(unix.S_IFBLK, 254, 254)},
		{"an empty directory", func(_ *tree, name string) error { return os.Mkdir(name, 0o700) }},
		{"a directory with a file", func(_ *tree, name string) error {
			if err := os.Mkdir(name, 0o700); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(name, "file"), []byte("content"), 0o600)
		}},
		{"a directory that nobody may read", func(_ *tree, name string) error { return os.Mkdir(name, 0) }},
		{"an empty file", func(_ *tree, name string) error { return os.WriteFile(name, nil, 0o600) }},
		{"a file of zeros", func(_ *tree, name string) error { return os.WriteFile(name, make([]byte, 8192), 0o600) }},
		{"a file that nobody may read", func(_ *tree, name string) error { return os.WriteFile(name, []byte("content"), 0) }},
		{"another user's file", func(_ *tree, name string) error {
			if err := os.WriteFile(name, []byte("content"), 0o600); err != nil {
				return err
			}
			return os.Chown(name, 12345, 12345)
		}},
		{"a sparse giant", func(_ *tree, name string) error {
			if err := os.WriteFile(name, nil, 0o600); err != nil {
				return err
			}
			return os.Truncate(name, 1<<40)
		}},
	}
}

// Put gives a name of the root to an intruder, in the place of what has it.
func (t *tree) Put(p place, in intruder) error {
	name := filepath.Join(t.Root, p.Path)
	if err := os.RemoveAll(name); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	if err := in.Make(t, name); err != nil {
		return fmt.Errorf("%s in the place of %s: %w", in.Name, p.Name, err)
	}
	return nil
}

// makeOutside fills the directory outside: piece is the bytes of a sound piece.
func (t *tree) makeOutside(piece []byte) error {
	if err := os.MkdirAll(filepath.Join(t.Outside, "dir", "sub"), 0o700); err != nil {
		return err
	}
	for _, name := range []string{"file", "dir/file", "dir/lock", "dir/sub/" + filepath.Base(t.Piece)} {
		if err := os.WriteFile(filepath.Join(t.Outside, name), []byte("not the host's"), 0o600); err != nil {
			return err
		}
	}
	for _, name := range []string{"piece.kv", "dir/" + filepath.Base(t.Piece)} {
		if err := os.WriteFile(filepath.Join(t.Outside, name), piece, 0o600); err != nil {
			return err
		}
	}
	return unix.Mkfifo(filepath.Join(t.Outside, "pipe"), 0o600)
}
