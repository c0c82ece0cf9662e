package transfer

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/kv"
)

// stage stores n chunks, one job each, under rules.
func (r *deviceRig) stage(n int, rules string) {
	r.t.Helper()
	from := r.shuffled(n)
	for c := range n {
		put := r.put(c, from[c])
		r.rules(rules)
		read, out := r.storeAll(put)
		r.rules("")
		if len(read.Failed)+len(out.Failed) > 0 {
			r.t.Fatal(read, out)
		}
	}
}

// loadOne loads chunk c under rules to poisoned pages and says how it failed.
func (r *deviceRig) loadOne(c int, rules string) (ids []uint32, err error) {
	r.t.Helper()
	r.poison()
	to := r.shuffled(1)
	r.rules(rules)
	out := r.load([]int{c}, to)
	r.rules("")
	if len(out.Failed) > 0 {
		return to[0], out.Failed[0].Err
	}
	return to[0], nil
}

// Whatever fails between slot and pages, right bytes arrive, and what windows cannot be trusted with goes without them.
func TestWindowFaultsAreWorkedAround(t *testing.T) {
	for _, c := range []struct {
		name, store, load string // rules
		windows           bool   // are still used
	}{
		{"nothing", "", "", true},
		{"a store's sums", "sums:nth=1:code=1", "", true},
		{"each store's sums", "sums:code=1", "", false},
		{"the copy to a slot", "cuMemcpyAsync:nth=1:code=1", "", true},
		{"a load's sums", "", "sums:nth=2:code=1", true},
		{"each load's sums", "", "sums:code=1", false},
		{"the copy from a slot", "", "cuMemcpyAsync:nth=2:code=1", true},
		{"the kernel behind the sums", "", "cuLaunchKernel:nth=2:code=1", true},
		{"bytes change on the bus", "", "cuMemcpyAsync:nth=1:flip=9000", true},
		{"and in the last window", "", "cuMemcpyAsync:nth=3:flip=100", true},
		{"and each time", "", "cuMemcpyAsync:flip=100", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("KVHOST_TEST_GPU", "")
			r := newDeviceRig(t, deviceShapes["many windows"], 16, 32<<20)
			r.stage(2, c.store)
			for n, rules := range []string{c.load, ""} {
				ids, err := r.loadOne(n, rules)
				testenv.OK(t, err)
				testenv.NoError(t, r.holds(n, ids, false))
			}
			if fits := r.gpu.FitsWindow(1, 1); fits != c.windows {
				t.Errorf("windows are used: %t", fits)
			}
		})
	}
}

// A damaged file fails its chunk, without a byte of the bad window in the pages, and nobody doubts the windows for
// it. The same goes for bytes that changed on their way from a window to a file.
func TestWindowFindsDamage(t *testing.T) {
	for _, c := range []struct {
		name, store string
		damage      bool
	}{{"of the file", "", true}, {"on the bus", "cuMemcpyAsync:nth=1:flip=77", false}} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("KVHOST_TEST_GPU", "")
			r := newDeviceRig(t, kv.Uniform(4, 4, 1, 10_000), 16, 32<<20)
			r.stage(1, c.store)
			if c.damage {
				flipPayload(t, r.root)
			}
			ids, err := r.loadOne(0, "")
			if !errors.Is(err, kv.ErrChecksum) || errors.Is(err, ErrDevice) {
				t.Errorf("the load ended with %v", err)
			}
			testenv.NoError(t, r.holds(0, ids, true))
			for plane := range r.geo.Planes {
				for i, id := range ids {
					if page := r.page(plane, id); strings.Count(page, "\xa5") != len(page) {
						t.Errorf("plane %d block %d was touched", plane, i)
					}
				}
			}
			if !r.gpu.FitsWindow(1, 1) {
				t.Error("the windows are left for a damaged file")
			}
		})
	}
}

// A GPU that is lost while a window is used fails the chunk and not the piece.
func TestLostGPUInAWindow(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, deviceShapes["small pages"], 16, 32<<20)
	r.stage(1, "")
	r.poison()
	to := r.shuffled(1)
	r.double.Rules("sums:code=700")
	for range 2 { // the second finds the piece where it was
		if out := r.load([]int{0}, to); len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, ErrDevice) {
			t.Errorf("load with a broken sums kernel: got %+v, want 1 chunk failed with ErrDevice", out)
		}
	}
}

// page reads one page.
func (r *deviceRig) page(plane int, id uint32) string {
	got := make([]byte, r.geo.Planes[plane].PageBytes)
	r.on(func(t *gds.Thread) error { return t.Read(got, r.address(plane, id)) })
	return string(got)
}

// flipPayload changes a bit in the payload of the only piece under a root.
func flipPayload(t *testing.T, root string) {
	t.Helper()
	found := 0
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.Contains(path, "/.kvhost") {
			return err
		}
		found++
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		data[len(data)/2] ^= 4
		return os.WriteFile(path, data, 0o600)
	})
	if err != nil || found != 1 {
		t.Fatalf("%d pieces, %v", found, err)
	}
}
