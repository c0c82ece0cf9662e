package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

// TestNetworkFileSystems meets what NFS and its like do to a put, a load and an eviction: replies that are lost,
// handles that are stale, errors that come with the close. What is reported as stored is there, what is not leaves
// nothing, and the account is exact. (A missing RENAME_NOREPLACE and a refused link are staging's, and tested there.)
func TestNetworkFileSystems(t *testing.T) {
	tests := []struct {
		rule string
		put  error // nil: works all the same
	}{
		{"publish ** 1st: estale after", nil},
		{"publish ** 1st: etimedout after", nil},
		{"publish ** 1st: exdev", unix.EXDEV},
		{"publish ** 1st: estale", unix.ESTALE},
		{"open **.tmp 1st: estale", nil},       // of a file that was taken over: a new one is made
		{"open **.tmp 1st: estale after", nil}, // of a file that was taken over: a new one is made
		{"close **.tmp 1st: eio after", unix.EIO},
		{"close **.tmp 1st: enospc after", unix.ENOSPC},
		{"close **.tmp 1st: edquot after", unix.EDQUOT},
		{"sync **.tmp 1st: eio", ErrSync},
		{"sync **.tmp 1st: edquot", ErrSync},
		{"stat **.tmp 1st: estale", nil}, // of a file that was taken over: a new one is made
		{"remove ** 1st: estale after", nil},
		{"remove ** 1st: estale", nil},
		{"rename ** 1st: estale after", nil},
	}
	for _, strict := range []bool{false, true} {
		for _, tt := range tests {
			t.Run(fmt.Sprintf("strict=%t/%s", strict, tt.rule), func(t *testing.T) {
				f, faulty := faultyFixture(t, 3, func(c *Config) { c.Strict = strict })
				f.mustPut(0, 1, 2)
				faulty.Set(faultfs.MustRules(tt.rule)...)
				err := f.put(3, 0) // which evicts
				struck := faulty.Injected() > 0
				faulty.Set()
				if want := tt.put; struck && !errors.Is(err, want) || !struck && err != nil {
					t.Errorf("got %v, want %v", err, want)
				}
				if err == nil != f.has(3) {
					t.Errorf("the put says %v, a lookup hits %t", err, f.has(3))
				}
				if err == nil {
					f.mustRead(3)
				}
				f.maintain(RetryRemovals)
				f.checkUsed()
				if left := f.temporaries(); len(left) > 0 {
					t.Errorf("temporaries: %v", left)
				}
				f.restart()
				if err == nil {
					f.mustRead(3)
				}
				f.checkUsed()
			})
		}
	}
}

// TestStaleHandles: a stale name is opened once more; one that stays stale is a miss from then on.
func TestStaleHandles(t *testing.T) {
	f, faulty := faultyFixture(t, 4)
	f.mustPut(0, 1)
	faulty.Set(faultfs.MustRules("open **.kv 1st: estale")...)
	f.mustRead(0)
	faulty.Set(faultfs.MustRules("open **.kv: estale")...)
	l := f.lookup(1)
	if _, err := l.Open(0, 0); !errors.Is(err, ErrGone) {
		t.Error(err)
	}
	l.Release()
	faulty.Set()
	if f.has(1) {
		t.Error("a hit on what was stale")
	}
	f.mustRead(0)
	f.checkUsed()
}

// TestNothingOfAnotherKind writes one key in namespaces that differ in one thing each, under one name: the others'
// bytes are never to be had, whatever stands there.
func TestNothingOfAnotherKind(t *testing.T) {
	dir := t.TempDir()
	f := newFixture(t, dir, 400, 1)
	f.mustPut(0)
	image, err := os.ReadFile(f.pieceFile(0, 0))
	must(t, err)
	for name, change := range map[string]func(*kv.Namespace){
		"revision":        func(n *kv.Namespace) { n.Revision = "2" },
		"dtype":           func(n *kv.Namespace) { n.DType = "bf16" },
		"tensor parallel": func(n *kv.Namespace) { n.TensorParallel = 2 },
		"pipeline":        func(n *kv.Namespace) { n.PipelineStages = 2 },
		"page bytes":      func(n *kv.Namespace) { n.Groups[0].Geometry = kv.Uniform(2, 2, 2, 1001) },
		"page order":      func(n *kv.Namespace) { n.Groups[0].Geometry = kv.Uniform(2, 4, 1, 1000) },
		"blocks":          func(n *kv.Namespace) { n.Groups[0].Geometry = kv.Uniform(4, 2, 1, 1000) },
		"hash seed":       func(n *kv.Namespace) { n.HashSeed = "other" },
	} {
		t.Run(name, func(t *testing.T) {
			o := newFixture(t, t.TempDir(), 400, 1)
			o.ns = testNamespace(1)
			change(o.ns)
			if o.space, err = o.store.Namespace(context.Background(), o.ns); err != nil {
				t.Fatal(err)
			}
			o.mustPut(0)
			if err := os.WriteFile(o.pieceFile(0, 0), image, 0o600); err != nil { // the first namespace's, under this name
				t.Fatal(err)
			}
			l := o.lookup(0)
			if _, err := read(l, 0, 0); !errors.Is(err, pieceformat.ErrWrongPiece) && !errors.Is(err, pieceformat.ErrDamaged) {
				t.Errorf("the other's bytes: %v", err)
			}
			l.Release()
		})
	}
}
