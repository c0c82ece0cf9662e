package store_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/fsck"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

var (
	only = flag.String("hostile.only", "", "run the cases whose name contains this")
	all  = flag.Bool("hostile.all", false, "run every case, not one in six")
)

const (
	stored   = 4 // pieces that are in the root when the intruder comes
	capacity = 6 * pieceBytes
	// pieceBytes is the size of a piece: header, table, and a page of payload.
	pieceBytes = 3 * pieceformat.Page
)

var namespace = &kv.Namespace{
	Model: "test/model", Revision: "1", DType: "fp8", Engine: "test", HashAlgorithm: "sha256", KeyBytes: 32,
	TokensPerBlock: 16, TensorParallel: 1, Groups: []kv.Group{{ID: 0, Geometry: kv.Uniform(1, 2, 1, 1000)}},
}

// rig is a store on a root.
type rig struct {
	testing.TB
	dir   string
	store *store.Store
	space *catalog.Namespace
	page  *staging.Slots
}

func (r *rig) open() {
	r.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := store.Open(ctx, store.Config{
		Roots: []store.RootConfig{{Path: r.dir, Capacity: capacity}}, HostID: treeHost, ScanWorkers: 1, ScanWait: time.Minute,
		UpkeepEvery: time.Hour, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		r.Fatalf("the host does not start: %v", err)
	}
	r.store = s
	<-s.ScanDone()
	if r.space, err = s.Namespace(ctx, namespace); err != nil {
		r.Fatalf("the namespace cannot be opened: %v", err)
	}
}

func (r *rig) close() {
	r.Helper()
	if err := r.store.Close(); err != nil {
		r.Errorf("close: %v", err)
	}
}

func key(n uint64) (k kv.Key) {
	g := rand.New(rand.NewPCG(n, 3))
	for i := range k {
		k[i] = byte(g.Uint32())
	}
	return k
}

// payload is the bytes of a key's piece.
func payload(n uint64, size int64) []byte {
	b := make([]byte, size)
	g := rand.New(rand.NewPCG(n, 4))
	for i := range b {
		b[i] = byte(g.Uint32())
	}
	return b
}

func (r *rig) put(n uint64) error {
	ctx := context.Background()
	p, err := r.store.Put(ctx, store.PutRequest{Namespace: r.space, Key: key(n)})
	if err != nil {
		return err
	}
	return storetest.Store(ctx, r.page, p, payload(n, p.Plan().PayloadBytes()))
}

// load reads a key's piece as a load does; false is a miss.
func (r *rig) load(n uint64) bool {
	r.Helper()
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{key(n)}})
	if err != nil {
		r.Fatal(err)
	}
	defer l.Release()
	if l.Hits() == 0 {
		return false
	}
	p, err := l.Open(0, 0)
	if err != nil {
		return false
	}
	defer p.Close()
	slot, err := r.page.Acquire(context.Background())
	if err != nil {
		r.Fatal(err)
	}
	defer slot.Release()
	image := slot.Bytes()[:pieceBytes]
	got, err := p.File().ReadAt(image, 0)
	if err != nil && err != io.EOF {
		p.Bad(err)
		return false
	}
	head, err := p.Verify(image[:got])
	if err == nil {
		data := image[head.DataOffset:got]
		err = kv.VerifyExtents(head.Plan, 0, len(head.Plan.Extents()), data, 0, head.Table)
	}
	if err != nil {
		p.Bad(err)
		return false
	}
	if want := payload(n, head.Plan.PayloadBytes()); !bytes.Equal(image[head.DataOffset:][:len(want)], want) {
		r.Errorf("key %d: wrong bytes", n)
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
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

// seed is a root that intruders come to, as it is after a clean end and after a kill.
type seed struct {
	clean, killed string
	tree          tree
	piece         []byte
	paths         [stored]string // below the root
}

func newSeed(t *testing.T, slots *staging.Slots) *seed {
	s := &seed{clean: filepath.Join(t.TempDir(), "clean"), killed: filepath.Join(t.TempDir(), "killed")}
	r := &rig{TB: t, dir: s.clean, page: slots}
	r.open()
	for n := range uint64(stored + 1) {
		if err := r.put(n); err != nil {
			t.Fatal(err)
		}
	}
	path := func(n uint64) string {
		found := ""
		_ = filepath.WalkDir(s.clean, func(name string, e fs.DirEntry, err error) error {
			if k := key(n); err == nil && strings.HasPrefix(e.Name(), k.String()) && !e.IsDir() {
				found, _ = filepath.Rel(s.clean, name)
			}
			return nil
		})
		if found == "" {
			t.Fatalf("key %d has no file", n)
		}
		return found
	}
	for n := range s.paths {
		s.paths[n] = path(uint64(n))
	}
	s.tree = tree{
		Piece: s.paths[0], Free: path(stored), Text: namespace.Digest().String(), Plan: r.space.Plan(0).Digest().String(),
	}
	if _, err := r.store.Discard(store.DiscardRequest{Namespace: r.space, Keys: []kv.Key{key(stored)}}); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(s.killed, os.DirFS(s.clean)); err != nil {
		t.Fatal(err)
	}
	r.close()
	var err error
	if s.piece, err = os.ReadFile(filepath.Join(s.clean, s.tree.Piece)); err != nil {
		t.Fatal(err)
	}
	return s
}

// lost says which keys an intruder takes away with a place.
func (s *seed) lost(p place) (lost [stored]bool) {
	for n, path := range s.paths {
		lost[n] = path == p.Path || strings.HasPrefix(path, p.Path+"/")
	}
	return lost
}

// TestTrees lets every intruder take every place, before a start and under a running host. What is outside is neither
// served nor changed nor removed; the host starts, serves what it has, stores and evicts within its capacity, and does
// not take its root out of service. fsck comes to an end.
func TestTrees(t *testing.T) {
	slots, err := staging.NewSlots(1, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slots.Close() })
	s := newSeed(t, slots)
	for i, p := range s.tree.places() {
		for j, in := range intruders() {
			name := in.Name + " for " + p.Name
			if !strings.Contains(name, *only) || !*all && *only == "" && (i+5*j)%6 != 0 {
				continue
			}
			for when, how := range []string{", after a clean end", ", after a kill", ", beside the host"} {
				if *all || *only != "" || i < 2 || when == (i+j)%3 {
					t.Run(name+how, func(t *testing.T) { s.run(t, slots, p, in, when) })
				}
			}
		}
	}
}

// run has an intruder come before a start that finds a checkpoint, before one that scans, or to a running host.
func (s *seed) run(t *testing.T, slots *staging.Slots, p place, in intruder, when int) {
	top := t.TempDir()
	tree := s.tree
	tree.Root, tree.Outside = filepath.Join(top, "root"), filepath.Join(top, "outside")
	from := s.clean
	if when == 1 {
		from = s.killed
	}
	err := errors.Join(os.CopyFS(tree.Root, os.DirFS(from)), tree.makeOutside(s.piece))
	if err != nil {
		t.Fatal(err)
	}
	come := func() {
		if err := tree.Put(p, in); errors.Is(err, unix.EPERM) {
			testenv.Need(t, testenv.Devices)
			t.Fatal(err)
		} else if err != nil {
			t.Fatal(err)
		}
	}
	r := &rig{TB: t, dir: tree.Root, page: slots}
	if when == 2 {
		r.open()
		come()
	} else {
		come()
	}
	before := faultfs.SumTree(t, tree.Outside)
	check := func(repair bool) {
		if _, err := fsck.Check(t.Context(), tree.Root, fsck.Options{Repair: repair, Workers: 1}); err != nil {
			t.Logf("fsck: %v", err)
		}
	}
	if when != 2 {
		check(false)
		r.open()
	}
	lost := s.lost(p)
	for n := range uint64(stored) {
		if hit := r.load(n); !hit && !lost[n] {
			t.Errorf("key %d is lost", n)
		}
	}
	for n := uint64(stored); n < 3*stored; n++ {
		if err := r.put(n); err != nil {
			t.Errorf("store of key %d: %v", n, err)
		} else if !r.load(n) {
			t.Errorf("key %d is not there after it was stored", n)
		}
		if bytes := used(t, tree.Root); bytes > capacity+foreign(in) {
			t.Errorf("%d bytes of %d after key %d", bytes, capacity, n)
		}
	}
	if st := r.store.Stats().Roots[0]; st.State != health.In || st.Outages != 0 {
		t.Errorf("the root is %s after %d outages: %s", st.State, st.Outages, st.Reason)
	}
	r.close()
	r.open()
	if !r.load(3*stored - 1) {
		t.Errorf("the last key is lost with a start")
	}
	r.close()
	check(true)
	if after := faultfs.SumTree(t, tree.Outside); after != before {
		t.Errorf("outside is\n%s\nwas\n%s", after, before)
	}
}

// foreign is what an intruder takes itself, where it is no piece and nobody's to count.
func foreign(in intruder) int64 { return 8192 + pieceBytes }
