package faultfs_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// machine returns an FS and a directory on it.
func machine(t testing.TB) (*faultfs.Machine, string) {
	base := t.TempDir()
	v, err := faultfs.NewMachine(staging.OS(), filepath.Join(base, "trash"))
	testenv.OK(t, err)
	dir := filepath.Join(base, "data")
	testenv.OK(t, os.Mkdir(dir, 0o700))
	return v, dir
}

func TestVolatileWithPower(t *testing.T) {
	v, dir := machine(t)
	faultfs.RunSuite(t, v, dir)
	testenv.OK(t, v.SyncFS(dir))
	left, err := os.ReadDir(filepath.Join(filepath.Dir(dir), "trash"))
	if err != nil || len(left) != 0 {
		t.Errorf("after a sync of all: %d files kept (%v)", len(left), err)
	}
}

func put(t testing.TB, fsys staging.FS, name string, flag int, data []byte, sync bool) {
	t.Helper()
	f, err := fsys.OpenFile(name, os.O_RDWR|flag, 0o600)
	testenv.OK(t, err)
	if _, err := f.WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	if sync {
		testenv.OK(t, f.Datasync())
	}
	testenv.OK(t, f.Close())
}

var must = testenv.OK

// What each way of writing may leave: the outcomes that no seed shows are a bug of the machine, the others of the way.
func TestPowerLossOutcomes(t *testing.T) {
	testenv.Slow(t)
	old, fresh := bytes.Repeat([]byte("o"), 3*staging.Align), bytes.Repeat([]byte("n"), 3*staging.Align)
	for _, c := range []struct {
		name string
		do   func(t testing.TB, v *faultfs.Machine, dir string)
		want []string // every one is seen, and nothing else
	}{
		{"synced file, synced name", func(t testing.TB, v *faultfs.Machine, dir string) {
			put(t, v, dir+"/x", os.O_CREATE, fresh, true)
			must(t, v.SyncDir(dir))
		}, []string{"new"}},
		{"synced file, name not synced", func(t testing.TB, v *faultfs.Machine, dir string) {
			put(t, v, dir+"/x", os.O_CREATE, fresh, true)
		}, []string{"new", "absent"}},
		{"name synced, bytes not", func(t testing.TB, v *faultfs.Machine, dir string) {
			put(t, v, dir+"/x", os.O_CREATE, fresh, false)
			must(t, v.SyncDir(dir))
		}, []string{"new", "mixed", "zero", "empty"}},
		{"overwritten in place", func(t testing.TB, v *faultfs.Machine, dir string) {
			put(t, v, dir+"/x", os.O_CREATE, old, true)
			must(t, v.SyncDir(dir))
			put(t, v, dir+"/x", 0, fresh, false)
		}, []string{"new", "old", "mixed"}},
		{"truncated", func(t testing.TB, v *faultfs.Machine, dir string) {
			put(t, v, dir+"/x", os.O_CREATE, old, true)
			must(t, v.SyncDir(dir))
			put(t, v, dir+"/x", os.O_TRUNC, nil, false)
		}, []string{"old", "empty"}},
		{"replaced by a synced file", func(t testing.TB, v *faultfs.Machine, dir string) {
			put(t, v, dir+"/x", os.O_CREATE, old, true)
			must(t, v.SyncDir(dir))
			put(t, v, dir+"/t", os.O_CREATE, fresh, true)
			must(t, v.Rename(dir+"/t", dir+"/x"))
		}, []string{"new", "old"}},
		{"removed", func(t testing.TB, v *faultfs.Machine, dir string) {
			put(t, v, dir+"/x", os.O_CREATE, old, true)
			must(t, v.SyncDir(dir))
			must(t, v.Remove(dir+"/x"))
		}, []string{"old", "absent"}},
		{"removed and synced", func(t testing.TB, v *faultfs.Machine, dir string) {
			put(t, v, dir+"/x", os.O_CREATE, old, true)
			must(t, v.SyncDir(dir))
			must(t, v.Remove(dir+"/x"))
			must(t, v.SyncDir(dir))
		}, []string{"absent"}},
		{"moved from another directory, that one synced", func(t testing.TB, v *faultfs.Machine, dir string) {
			must(t, v.Mkdir(dir+"/d", 0o700))
			must(t, v.SyncDir(dir))
			put(t, v, dir+"/d/x", os.O_CREATE, fresh, true)
			must(t, v.RenameNoReplace(dir+"/d/x", dir+"/x"))
			must(t, v.SyncDir(dir+"/d"))
		}, []string{"new"}},
		{"all flushed", func(t testing.TB, v *faultfs.Machine, dir string) {
			put(t, v, dir+"/x", os.O_CREATE, fresh, false)
			must(t, v.SyncFS(dir))
		}, []string{"new"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			seen := map[string]bool{}
			for seed := range uint64(200) {
				v, dir := machine(t)
				c.do(t, v, dir)
				must(t, v.PowerLoss(seed))
				if _, err := v.Stat(dir); !errors.Is(err, faultfs.ErrPowerLost) {
					t.Fatalf("seed %d: works on without power: %v", seed, err)
				}
				seen[outcome(t, dir+"/x", old, fresh)] = true
			}
			for _, w := range c.want {
				if !seen[w] {
					t.Errorf("no seed left it %s", w)
				}
				delete(seen, w)
			}
			for o := range seen {
				t.Errorf("some seed left it %s", o)
			}
		})
	}
}

func outcome(t testing.TB, name string, old, fresh []byte) string {
	got, err := os.ReadFile(name)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "absent"
	case err != nil:
		t.Fatal(err)
	case len(got) == 0:
		return "empty"
	case bytes.Equal(got, old):
		return "old"
	case bytes.Equal(got, fresh):
		return "new"
	case bytes.Count(got, []byte{0}) == len(got):
		return "zero"
	case len(got) == len(fresh):
		return "mixed"
	}
	return fmt.Sprintf("with %d bytes", len(got))
}

// Whatever is done, what was synced last is there, and a seed strikes the same twice.
func TestPowerLossKeepsWhatWasSynced(t *testing.T) {
	for seed := range uint64(40) {
		var first string
		for range 2 {
			v, dir := machine(t)
			durable := work(t, v, dir, rand.New(rand.NewPCG(seed, 2)))
			must(t, v.PowerLoss(seed))
			state := ""
			for n := range 6 {
				name := fmt.Sprintf("%s/%d", dir, n)
				got, _ := os.ReadFile(name)
				state += fmt.Sprintf("%d:%x ", n, got)
				if want, ok := durable[name]; ok && !bytes.Equal(got, want) {
					t.Fatalf("seed %d: %s was synced with %q, holds %.20q", seed, name, want, got)
				}
			}
			if first == "" {
				first = state
			} else if state != first {
				t.Fatalf("seed %d left two different states", seed)
			}
		}
	}
}

// work changes a few files at random and tells those that nothing happened to since they were durable.
func work(t testing.TB, v *faultfs.Machine, dir string, rng *rand.Rand) map[string][]byte {
	durable, named := map[string][]byte{}, map[string][]byte{}
	for range 60 {
		name := fmt.Sprintf("%s/%d", dir, rng.IntN(6))
		switch rng.IntN(5) {
		case 0, 1:
			data := []byte(fmt.Sprint("data ", rng.IntN(1000)))
			put(t, v, name, os.O_CREATE|os.O_TRUNC, data, true)
			delete(durable, name)
			named[name] = data
		case 2:
			_ = v.Remove(name)
			delete(durable, name)
			delete(named, name)
		case 3:
			to := fmt.Sprintf("%s/%d", dir, rng.IntN(6))
			if data, ok := named[name]; ok && to != name {
				must(t, v.Rename(name, to))
				delete(durable, name)
				delete(durable, to)
				delete(named, name)
				named[to] = data
			}
		case 4:
			must(t, v.SyncDir(dir))
			for name, data := range named {
				durable[name] = data
			}
		}
	}
	return durable
}

func TestPowerRule(t *testing.T) {
	v, dir := machine(t)
	f := faultfs.New(v, faultfs.MustRules("write **/x 2nd: power")...)
	lock, err := f.Lock(dir + "/lock")
	must(t, err)
	put(t, f, dir+"/x", os.O_CREATE, []byte("one"), false)
	file, err := f.OpenFile(dir+"/x", os.O_RDWR, 0)
	must(t, err)
	if _, err := file.WriteAt([]byte("two"), 0); !errors.Is(err, faultfs.ErrPowerLost) || !errors.Is(err, faultfs.ErrInjected) {
		t.Fatalf("the write that lost the power: %v", err)
	}
	if _, err := f.Stat(dir); !errors.Is(err, faultfs.ErrPowerLost) {
		t.Fatalf("after it: %v", err)
	}
	must(t, file.Close())
	if err := lock.Close(); err == nil {
		t.Error("a lock outlived the machine")
	}
	again, err := staging.OS().Lock(dir + "/lock")
	must(t, err)
	must(t, again.Close())
}
