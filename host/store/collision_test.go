package store

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/plugintest/hostile"
	"github.com/kvhost/kvhost/host/policy/policytest"
)

// oneName is a place policy that gives all pieces one name.
func oneName(t *testing.T) *policy.Module {
	t.Helper()
	modules := hostile.Modules()
	at := slices.IndexFunc(modules, func(m hostile.Module) bool { return m.String() == "places/one name for all" })
	path := filepath.Join(t.TempDir(), "collides.wasm")
	if err := os.WriteFile(path, modules[at].Wasm, 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := policy.Open(t.Context(), path, policy.Options{Cache: policytest.Cache(t), SkipSelfTest: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return m
}

// A place policy that gives two pieces one name is wrong about that name only, and a policy answers for no second file
// that somebody made of a piece: when the store looks where pieces are, neither proves that the policy is not pure.
func TestCollidingNamesAreNoImpurity(t *testing.T) {
	m := oneName(t)
	f := newFixture(t, t.TempDir(), 8, 1, func(c *Config) { c.Policies.Place = handle(m) })
	defer f.store.Close()
	look := func(what string) {
		t.Helper()
		generation := f.space.Class(0).Place
		if err := f.store.roots[0].recovery.Misplaced(t.Context(), generation); err != nil {
			t.Fatal(err)
		}
		if err := m.Quarantined(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		f.mustRead(0)
		f.mustRead(1)
	}
	f.mustPut(0, 1) // the second gets the built-in name
	if faults := f.space.Class(0).Place.Policy.Stats().Faults; faults != 1 {
		t.Errorf("%d faults", faults)
	}
	look("a piece with the built-in name")
	dir := f.cfg.Roots[0].Path
	piece, err := os.ReadFile(dir + "/everything")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/copy", piece, 0o600); err != nil {
		t.Fatal(err)
	}
	look("a copy of a piece")
	if err := os.Rename(dir+"/everything", dir+"/elsewhere"); err != nil {
		t.Fatal(err)
	}
	if err := f.store.roots[0].recovery.Misplaced(t.Context(), f.space.Class(0).Place); err != nil || m.Quarantined() == nil {
		t.Errorf("a piece that is only elsewhere proves nothing: %v", err)
	}
}

// A file with a built-in name that somebody removed says nothing of the place policy of its namespace, which never gave it.
func TestLostBuiltinNameIsNoImpurity(t *testing.T) {
	m := oneName(t)
	f := newFixture(t, t.TempDir(), 8, 1, func(c *Config) { c.Policies.Place = handle(m) })
	defer f.store.Close()
	f.mustPut(0, 1) // the second gets the built-in name
	builtin := f.files()[slices.IndexFunc(f.files(), func(name string) bool { return strings.Contains(name, "/") })]
	if err := os.Remove(filepath.Join(f.cfg.Roots[0].Path, builtin)); err != nil {
		t.Fatal(err)
	}
	l := f.lookup(1)
	defer l.Release()
	if _, err := read(l, 0, 0); err == nil {
		t.Fatal("a removed piece was read")
	}
	if err := m.Quarantined(); err != nil {
		t.Error(err)
	}
	f.mustRead(0)
	f.mustPut(2)
}
