package fsck

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"github.com/zeebo/xxh3"
)

// rig is a store on one directory, with files in it.
type rig struct {
	testing.TB
	dir   string
	store *store.Store
	space *catalog.Namespace
	slots *staging.Slots
}

const hostID = "fsckhost"

func newRig(t testing.TB, capacity int64) *rig {
	r := &rig{TB: t, dir: t.TempDir()}
	var err error
	if r.slots, err = staging.NewSlots(1, 1<<20); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.slots.Close() })
	r.open(capacity)
	return r
}

func (r *rig) open(capacity int64) {
	r.Helper()
	r.openRoot(store.RootConfig{Path: r.dir, Capacity: capacity})
}

func (r *rig) openRoot(cfg store.RootConfig) {
	r.Helper()
	ctx := context.Background()
	ns := &kv.Namespace{
		Model: "test/model", Revision: "1", DType: "fp8", Engine: "test", HashAlgorithm: "sha256", KeyBytes: 32,
		TokensPerBlock: 16,
		TensorParallel: 1, Groups: []kv.Group{{ID: 0, Geometry: kv.Uniform(2, 8, 2, 5000)}},
	}
	var err error
	if r.store, err = store.Open(ctx,
		store.Config{Roots: []store.RootConfig{cfg}, HostID: hostID}); err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { r.store.Close() })
	if r.space, err = r.store.Namespace(ctx, ns); err != nil {
		r.Fatal(err)
	}
}

func key(n uint64) (k kv.Key) {
	g := rand.New(rand.NewPCG(n, 3))
	for i := range k {
		k[i] = byte(g.Uint32())
	}
	return k
}

func (r *rig) put(n uint64) error {
	ctx := context.Background()
	p, err := r.store.Put(ctx, store.PutRequest{Namespace: r.space, Key: key(n)})
	if err != nil {
		return err
	}
	payload := make([]byte, p.Plan().PayloadBytes())
	g := rand.New(rand.NewPCG(n, 4))
	for i := range payload {
		payload[i] = byte(g.Uint32())
	}
	return storetest.Store(ctx, r.slots, p, payload)
}

func (r *rig) mustPut(ns ...uint64) {
	r.Helper()
	for _, n := range ns {
		must(r, r.put(n))
	}
}

func (r *rig) hit(n uint64) bool {
	r.Helper()
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{key(n)}})
	must(r, err)
	defer l.Release()
	if l.Hits() == 0 {
		return false
	}
	p, err := l.Open(0, 0)
	if err != nil {
		return false
	}
	p.Close()
	return true
}

// pieces are the published files, by the number of their key.
func (r *rig) pieces(most uint64) map[uint64]string {
	r.Helper()
	byKey := map[kv.Key]uint64{}
	for n := range most {
		byKey[key(n)] = n
	}
	found := map[uint64]string{}
	err := filepath.WalkDir(r.dir, func(name string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || strings.Contains(name, pieceformat.MetaDir) {
			return err
		}
		b, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if h, err := pieceformat.DecodeHeader(b); err == nil {
			found[byKey[h.Key]] = name
		}
		return nil
	})
	must(r, err)
	return found
}

func (r *rig) change(name string, how func(b []byte) []byte) {
	r.Helper()
	b, err := os.ReadFile(name)
	if err == nil {
		err = os.WriteFile(name, how(b), 0o600)
	}
	must(r, err)
}

func (r *rig) check(o Options) *Report {
	r.Helper()
	report, err := Check(context.Background(), r.dir, o)
	must(r, err)
	return report
}

// resum makes a changed header consistent again.
func resum(b []byte) []byte {
	const at = 192
	clear(b[at : at+8])
	sum := xxh3.Hash(b[:pieceformat.Page])
	for i := range 8 {
		b[at+i] = byte(sum >> (8 * i))
	}
	return b
}

func kinds(r *Report) map[string]Kind {
	m := map[string]Kind{}
	for _, p := range r.Problems {
		m[filepath.Join(r.Root, p.Path)] = p.Kind
	}
	return m
}

// must ends a test that cannot go on without what failed.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
