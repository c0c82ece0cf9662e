package transfer

import (
	"os"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// newMemoryRig is a deviceRig on a root in memory that is registered with the GPU.
func newMemoryRig(
	t testing.TB, geo kv.Geometry, blocks uint32, change ...func(*store.Config)) (*deviceRig, *memfs.FS) {
	t.Helper()
	return newMemoryRigOf(t, "bf16", geo, blocks, change...)
}

// newMemoryRigOf is newMemoryRig for pages of a dtype.
func newMemoryRigOf(
	t testing.TB, dtype string, geo kv.Geometry, blocks uint32, change ...func(*store.Config)) (*deviceRig, *memfs.FS) {
	t.Helper()
	const bytes = 96 << 20 // all of it is touched
	mem, err := memfs.New(bytes, nil)
	testenv.OK(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, mem.Close())
	})
	faulty := faultfs.New(mem)
	r := newDeviceRigOf(t, dtype, geo, blocks, 16<<20, append(change, func(c *store.Config) {
		c.FS, c.Roots[0].Path, c.Roots[0].Capacity = faulty, "/root", memfs.Usable(bytes)
	})...)
	r.root, r.fs = "/root", faulty
	mem.Start(nil, r.gpu.Pinner())
	<-mem.Grown()
	t.Cleanup(func() {
		testenv.NoError(t, mem.Unlock())
	})
	return r, mem
}

// memoryFile returns the memory of a chunk's file.
func (r *deviceRig) memoryFile(mem *memfs.FS, n int) staging.Segments {
	r.t.Helper()
	var find func(dir string) string
	find = func(dir string) string {
		list, err := mem.ReadDir(dir)
		testenv.OK(r.t, err)
		for _, e := range list {
			name := dir + "/" + e.Name()
			if !e.IsDir() && strings.HasPrefix(e.Name(), deviceKey(n).String()) {
				return name
			}
			if e.IsDir() && e.Name()[0] != '.' {
				if found := find(name); found != "" {
					return found
				}
			}
		}
		return ""
	}
	f, err := mem.OpenFile(find(r.root), os.O_RDONLY, 0)
	testenv.OK(r.t, err)
	defer f.Close()
	s, err := staging.MemoryOf(f, 1)
	if err != nil || s == nil {
		r.t.Fatal(s == nil, err)
	}
	return s
}

// lookup looks one chunk up.
func (r *deviceRig) lookup(n int) *store.Lease {
	r.t.Helper()
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{deviceKey(n)}, Ranks: 1})
	testenv.OK(r.t, err)
	return l
}

// hits is how many of one chunk the store has: 0 or 1.
func (r *deviceRig) hits(n int) int {
	r.t.Helper()
	l := r.lookup(n)
	defer l.Release()
	return l.Hits()
}
