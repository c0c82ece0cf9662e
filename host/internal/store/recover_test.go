package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

func put(t testing.TB, name string, data []byte) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(name), 0o700))
	must(t, os.WriteFile(name, data, 0o600))
}

// TestScanOfAMess opens a root in which crashes, other programs and a careless operator have left what they leave.
func TestScanOfAMess(t *testing.T) {
	dir := t.TempDir()
	f := newFixture(t, dir, 400, 1)
	f.mustPut(0, 1, 2, 3, 4, 5, 6)
	var names []string
	for n := range uint64(7) {
		names = append(names, f.pieceFile(n, 0))
	}
	image := func(n uint64) []byte {
		b, err := os.ReadFile(names[n])
		must(t, err)
		return b
	}
	change := func(n uint64, how func(b []byte) []byte) { put(t, names[n], how(image(n))) }
	must(t, f.store.Close())
	change(1, func(b []byte) []byte { return b[:100] })                          // truncated header
	change(2, func(b []byte) []byte { return b[:2*pieceformat.Page] })           // truncated payload
	change(3, func(b []byte) []byte { b[96] ^= 1; return b })                    // flipped bit in the depth
	change(4, func(b []byte) []byte { return append([]byte(nil), image(6)...) }) // another key's piece under this name
	change(5, func(b []byte) []byte { b[8] = 9; return b })                      // of a later version
	foreign := map[string]string{
		"README.txt": "notes", "other/deep/data.bin": strings.Repeat("x", 3*pieceformat.Page), ".hidden": "h",
		"lost+found/f": "l",
	}
	for name, text := range foreign {
		put(t, filepath.Join(dir, name), []byte(text))
	}
	must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "link")))
	temps := []string{
		filepath.Join(filepath.Dir(names[0]), ".x.kv.testhost.1f.tmp"), filepath.Join(dir, ".y.otherhost.2.tmp"),
	}
	for _, name := range temps {
		put(t, name, make([]byte, 2*pieceformat.Page))
	}
	stranger := image(6)
	h, err := pieceformat.DecodeHeader(stranger)
	must(t, err)
	h.Namespace = kv.Digest([]byte("some other space"))
	h.Encode(stranger)
	put(t, filepath.Join(dir, "stranger"), stranger)

	f.start()
	for n := range uint64(7) {
		if got, want := f.has(n), n == 0 || n == 6; got != want {
			t.Errorf("key %d: hit %t", n, got)
		}
	}
	f.mustRead(0, 6)
	for name, text := range foreign {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != text {
			t.Errorf("foreign file %s: %v", name, err)
		}
	}
	for _, name := range append(temps, names[1:6]...) {
		if _, err := os.Stat(name); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
	st := f.store.Stats().Roots[0]
	equal(t, "Recovered", st.Recovered, 2)
	equal(t, "Quarantined", st.Quarantined, 6)
	equal(t, "Swept", st.Swept, 2)
	equal(t, "Foreign", st.Foreign, 5)
	equal(t, "Unclaimed", st.Unclaimed, 2)
	noError(t, f.idle())
	f.mustPut(1, 2, 3, 4, 5)
	f.mustRead(upTo(7)...)
}

// TestQuarantineIsBounded damages piece after piece.
func TestQuarantineIsBounded(t *testing.T) {
	f := newFixture(t, t.TempDir(), 100, 1, func(c *Config) { c.QuarantineFiles = 2 })
	for n := range uint64(6) {
		f.mustPut(n)
		b, err := os.ReadFile(f.pieceFile(n, 0))
		must(t, err)
		b[3*pieceformat.Page] ^= 1
		put(t, f.pieceFile(n, 0), b)
		l := f.lookup(n)
		if _, err := read(l, 0, 0); err == nil {
			t.Fatal("a damaged piece was read")
		}
		if _, err := l.Open(0, 0); !errors.Is(err, ErrGone) {
			t.Errorf("the damaged piece again, under the same lease: %v", err)
		}
		if f.has(n) {
			t.Error("a hit after damage, while the lease is held")
		}
		l.Release()
	}
	list, err := os.ReadDir(filepath.Join(f.cfg.Roots[0].Path, pieceformat.QuarantineDir))
	if err != nil || len(list) != 2 {
		t.Errorf("%d files in quarantine, %v", len(list), err)
	}
	st := f.store.Stats().Roots[0]
	equal(t, "Held", st.Held, 2*pieceBytes)
	equal(t, "Damaged", st.Damaged, 6)
	equal(t, "Entries", st.Entries, 0)
	equal(t, "Used", st.Used, st.Held)
	f.checkUsed()
	f.restart()
	if got := f.store.Stats().Roots[0]; got.Held != 2*pieceBytes {
		t.Errorf("after a restart %d bytes held", got.Held)
	}
	f.checkUsed()
}

func TestRootBusy(t *testing.T) {
	dir := t.TempDir()
	f := newFixture(t, dir, 4, 1)
	_, err := Open(context.Background(), f.cfg)
	if !errors.Is(err, ErrRootBusy) || !strings.Contains(err.Error(), dir) ||
		!strings.Contains(err.Error(), "shared = true") {
		t.Errorf("a second host: %v", err)
	}
	two := f.cfg
	two.Roots = []RootConfig{{Path: t.TempDir(), Capacity: 1 << 20}, f.cfg.Roots[0]}
	if _, err := Open(context.Background(), two); !errors.Is(err, ErrRootBusy) {
		t.Errorf("a second host with another root: %v", err)
	}
	two.Roots = two.Roots[:1]
	s, err := Open(context.Background(), two)
	if err != nil {
		t.Fatalf("the free root stayed locked: %v", err)
	}
	s.Close()
	f.restart()
}

func TestCapacityShrinks(t *testing.T) {
	f := newFixture(t, t.TempDir(), 10, 1)
	f.mustPut(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
	f.cfg.Roots[0].Capacity = 4 * pieceBytes
	f.restart()
	for n := range uint64(10) {
		if got, want := f.has(n), n >= 6; got != want {
			t.Errorf("key %d: hit %t", n, got)
		}
	}
	f.checkUsed()
}

// TestLayoutPolicyChanges reads pieces with the plan that they were written under.
func TestLayoutPolicyChanges(t *testing.T) {
	layout := policy.NativeModule("blocks", []abi.Role{abi.RoleLayout}, func(guest.Info) (any, error) {
		return blockMajor{}, nil
	})
	f := newFixture(t, t.TempDir(), 10, 1, func(c *Config) { c.Policies.Layout = handle(layout) })
	f.mustPut(0, 1)
	before := f.space.Plan(0)
	f.cfg.Policies.Layout = nil
	f.restart()
	f.mustPut(2)
	if f.space.Plan(0).Digest() == before.Digest() {
		t.Fatal("both policies lay out alike")
	}
	for n, want := range map[uint64]string{
		0: before.Digest().String(), 1: before.Digest().String(), 2: f.space.Plan(0).Digest().String(),
	} {
		l := f.lookup(n)
		p, err := l.Open(0, 0)
		must(t, err)
		b, err := os.ReadFile(p.File().Name())
		must(t, err)
		if h, err := p.Verify(b); err != nil || h.Plan.Digest().String() != want {
			t.Errorf("key %d: %v", n, err)
		}
		if _, err := read(l, 0, 0); err != nil {
			t.Errorf("key %d: %v", n, err)
		}
		p.Close()
		l.Release()
	}
	f.checkUsed()
}

// blockMajor lays out each block's pages one after the other.
type blockMajor struct{}

func (blockMajor) Layout(h abi.LayoutHeader, planes []abi.Plane, dst []abi.Segment) []abi.Segment {
	for b := range h.Blocks {
		for i, p := range planes {
			dst = append(dst, abi.Segment{Plane: uint32(i), Block: b, Blocks: 1, PageLen: p.PageBytes})
		}
	}
	return dst
}

func TestNamespacesDoNotMix(t *testing.T) {
	f := newFixture(t, t.TempDir(), 10, 1)
	f.mustPut(0, 1)
	other := *f.ns
	other.Revision = "2"
	space, err := f.store.Namespace(context.Background(), &other)
	must(t, err)
	if space.ID == f.space.ID || space.Digest == f.space.Digest {
		t.Error("two namespaces are one")
	}
	l, err := f.store.Lookup(LookupRequest{Namespace: space, Keys: keys(0, 1)})
	if err != nil || l.Hits() != 0 {
		t.Errorf("%d hits in another namespace, %v", l.Hits(), err)
	}
	l.Release()
	again, err := f.store.Namespace(context.Background(), &other)
	if err != nil || again != space {
		t.Errorf("the same namespace is another space: %v", err)
	}
}

func TestMembershipLookup(t *testing.T) {
	f := newFixture(t, t.TempDir(), 10, 1)
	for _, n := range []uint64{1, 3} {
		q := f.request(n, n, 0)
		q.Group = 1
		p, err := f.store.Put(context.Background(), q)
		must(t, err)
		must(t, write(p))
		must(t, p.Publish(context.Background()))
	}
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Group: 1, Keys: keys(0, 1, 2, 3, 4)})
	if err != nil || l.Hits() != 2 || l.Has(0) || !l.Has(1) || l.Has(2) || !l.Has(3) || l.Has(4) {
		t.Errorf("%d hits, %v", l.Hits(), err)
	}
	if _, err := l.Open(2, 0); !errors.Is(err, ErrLeaseOver) {
		t.Errorf("open of a miss: %v", err)
	}
	if p, err := l.Open(3, 0); err != nil {
		t.Error(err)
	} else {
		l.Release()
		p.Close()
		p.Close()
	}
	noError(t, f.idle())
}
