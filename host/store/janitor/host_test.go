package janitor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/storetest"
	"github.com/kvhost/kvhost/staging"
)

// TestAHostsRoot: one that a host has is refused; one that it has left is bounded, and the host finds what is left, and
// promises nothing else.
func TestAHostsRoot(t *testing.T) {
	ctx := context.Background()
	h := newHost(t)
	const n = 10
	for i := range n {
		h.put(byte(i + 1))
	}
	if _, err := New(ctx, h.dir, Options{Capacity: 1 << 20}); !errors.Is(err, ErrInUse) {
		t.Errorf("a root in use: %v", err)
	}
	if err := h.store.Close(); err != nil {
		t.Fatal(err)
	}
	j, err := New(ctx, h.dir, Options{Capacity: 5 * h.bytes, Low: 1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(ctx, h.cfg); !errors.Is(err, store.ErrRootBusy) {
		t.Errorf("a host beside a janitor: %v", err)
	}
	r, err := j.Round(ctx)
	if err != nil || r.Removed.Files != n-5 {
		t.Errorf("%v: %+v", err, r)
	}
	if _, err := os.Stat(filepath.Join(h.dir, pieceformat.CheckpointFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the index that the host has left: %v", err) // it would compare some files only
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	h.open()
	hits := 0
	for i := range n {
		hit, err := h.load(byte(i + 1))
		if err != nil {
			t.Errorf("key %d was promised: %v", i+1, err)
		}
		if hit {
			hits++
		}
	}
	if st := h.store.Stats().Roots[0]; hits != 5 || st.Used != 5*h.bytes || st.Vanished != 0 {
		t.Errorf("%d hits, want 5: %+v", hits, st)
	}
	if _, err := New(ctx, h.dir, Options{}); !errors.Is(err, ErrConfig) {
		t.Errorf("no capacity: %v", err)
	}
}

// TestAHostComes: a directory that was nobody's becomes a host's root while the janitor goes its rounds. The host is
// left in peace.
func TestAHostComes(t *testing.T) {
	h := newHost(t)
	if err := errors.Join(h.store.Close(), os.RemoveAll(h.dir), os.Mkdir(h.dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	j, err := New(context.Background(), h.dir, Options{Capacity: h.bytes, Low: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if _, err := j.Round(context.Background()); err != nil {
		t.Fatal(err)
	}
	h.open()
	h.put(1)
	h.put(2)
	if r, err := j.Round(context.Background()); !errors.Is(err, ErrInUse) || r.Removed.Files != 0 {
		t.Errorf("%v: %+v", err, r)
	}
	for key := byte(1); key < 3; key++ {
		if hit, err := h.load(key); !hit || err != nil {
			t.Errorf("key %d: %t, %v", key, hit, err)
		}
	}
	if err := h.store.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err := j.Round(context.Background()); err != nil || r.Removed.Files != 1 {
		t.Errorf("when the host has gone: %v: %+v", err, r)
	}
}

// host is a store on its own directory.
type host struct {
	testing.TB
	dir   string
	cfg   store.Config
	store *store.Store
	space *catalog.Namespace
	bytes int64 // of a piece
}

func newHost(t testing.TB) *host {
	h := &host{TB: t, dir: t.TempDir()}
	h.cfg = store.Config{Roots: []store.RootConfig{{Path: h.dir, Capacity: 1 << 30}}, HostID: "a"}
	h.open()
	h.bytes = h.put(100)
	if err := h.store.Close(); err != nil {
		t.Fatal(err)
	}
	h.dir = t.TempDir()
	h.cfg.Roots[0].Path = h.dir
	h.open()
	return h
}

func (h *host) open() {
	h.Helper()
	ns := &chunk.Namespace{
		Model: "test/model", Revision: "1", DType: "fp8", Engine: "test", HashAlgorithm: "sha256", KeyBytes: 32,
		TokensPerBlock: 16,
		TensorParallel: 1, Groups: []chunk.Group{{ID: 0, Geometry: chunk.Uniform(2, 2, 2, 1000)}},
	}
	var err error
	if h.store, err = store.Open(context.Background(), h.cfg); err != nil {
		h.Fatal(err)
	}
	s := h.store
	h.Cleanup(func() { s.Close() })
	if h.space, err = s.Namespace(context.Background(), ns); err != nil {
		h.Fatal(err)
	}
}

// put stores a key's piece and says how large it is.
func (h *host) put(key byte) int64 {
	h.Helper()
	p, err := h.store.Put(context.Background(), store.PutRequest{Namespace: h.space, Key: chunk.Key{key}})
	if err != nil {
		h.Fatal(err)
	}
	slots, err := staging.NewSlots(1, int(p.FileBytes()))
	if err != nil {
		h.Fatal(err)
	}
	defer slots.Close()
	if err := storetest.Store(context.Background(), slots, p, nil); err != nil {
		h.Fatal(err)
	}
	return p.FileBytes()
}

// load looks a key up and opens its piece.
func (h *host) load(key byte) (hit bool, err error) {
	h.Helper()
	l, err := h.store.Lookup(store.LookupRequest{Namespace: h.space, Keys: []chunk.Key{{key}}})
	if err != nil {
		h.Fatal(err)
	}
	defer l.Release()
	if l.Hits() == 0 {
		return false, nil
	}
	p, err := l.Open(0, 0)
	if err == nil {
		p.Close()
	}
	return true, err
}
