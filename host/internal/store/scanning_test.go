package store

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// gated is a file system whose directories below a root cannot be listed until the gate opens, and which has nothing on
// it but what stands there.
type gated struct {
	staging.FS
	dir  string
	used int64
	gate chan struct{}
}

// reopenGated closes the store, ruins its checkpoint and opens it again. The scan waits until the gate opens.
func (f *fixture) reopenGated() *gated {
	f.Helper()
	must(f, f.store.Close())
	dir := f.cfg.Roots[0].Path
	put(f, dir+"/"+pieceformat.CheckpointFile, []byte("no checkpoint"))
	used, _ := usage(f, dir)
	g := &gated{FS: staging.OS(), dir: dir, used: used, gate: make(chan struct{})}
	f.cfg.FS, f.cfg.ScanWait, f.cfg.IOTimeout = g, -1, time.Hour
	f.open()
	return g
}

func (g *gated) ReadDir(name string) ([]fs.DirEntry, error) {
	if rel, below := strings.CutPrefix(name, g.dir+"/"); below && rel != "" &&
		!strings.HasPrefix(rel, pieceformat.MetaDir) {
		<-g.gate
	}
	return g.FS.ReadDir(name)
}

func (g *gated) Statfs(string) (staging.Space, error) {
	return staging.Space{Total: 1 << 40, Free: 1<<40 - g.used, Available: 1<<40 - g.used}, nil
}

// TestServesWhileItScans opens a root after a crash and uses it while its directories cannot be listed.
func TestServesWhileItScans(t *testing.T) {
	const entries, room = 20, 30
	f := newFixture(t, t.TempDir(), room, 1)
	f.mustPut(upTo(entries)...)
	dir := f.cfg.Roots[0].Path
	g := f.reopenGated()
	within := func() {
		t.Helper()
		if disk, _ := usage(t, dir); disk > f.cfg.Roots[0].Capacity {
			t.Fatalf("%d bytes on disk, of %d", disk, f.cfg.Roots[0].Capacity)
		}
		must(t, f.check())
	}
	select {
	case <-f.store.ScanDone():
		t.Fatal("the scan has ended")
	default:
	}
	if st := f.store.Stats().Roots[0]; !st.Scanning || st.Unscanned == 0 || f.has(3) {
		t.Errorf("%+v", st)
	}
	if err := f.put(3, 0); !errors.Is(err, ErrResident) { // its file is found by its name
		t.Errorf("put of an unseen piece: %v", err)
	}
	f.mustRead(3)
	within()
	stored := uint64(0)
	for n := uint64(100); ; n++ {
		err := f.put(n, 0)
		if errors.Is(err, ErrNoSpace) {
			break
		}
		must(t, err)
		stored++
		f.mustRead(n)
		within()
	}
	if stored == 0 || stored > room-entries {
		t.Errorf("%d stored beside %d unseen, with room for %d", stored, entries, room)
	}
	f.drop(3) // as of a damaged file
	close(g.gate)
	<-f.store.ScanDone()
	if st := f.store.Stats().Roots[0]; st.Scanning || st.Unscanned != 0 || st.Swept != 0 {
		t.Errorf("%+v", st)
	}
	f.checkUsed()
	noError(t, f.idle())
	// The policy knows all of them, what was touched during the scan as the newest.
	for n := range uint64(4) {
		f.mustPut(200 + n)
	}
	gone := int(stored) + entries - 1 + 4 - room
	for _, n := range []uint64{0, 1, 2, 4, 5, 6, 100, 100 + stored - 1, 19} {
		if f.has(n) != (n > 6 || n != 3 && int(n) > gone) {
			t.Errorf("key %d: hit %t, after %d evictions", n, f.has(n), gone)
		}
	}
	within()
}

// markOf is the mark of a key's entry.
func (f *fixture) markOf(n uint64) entries.Mark {
	f.Helper()
	l := f.lookup(n)
	defer l.Release()
	if l.Hits() == 0 {
		f.Fatalf("key %d is a miss", n)
	}
	return entries.Mark{Slot: l.grants[0].Slot, Fingerprint: l.grants[0].Fingerprint}
}

// TestClosedBeforeAllIsTold ends the store while the evict policy is told what a scan has found. Its state is not kept,
// since what it has not heard of would never be a victim again.
func TestClosedBeforeAllIsTold(t *testing.T) {
	told := 0
	module := policy.NativeModule("keeper", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) {
		return &keeper{told: &told}, nil
	}).KeepState("keeper/1")
	f := newFixture(t, t.TempDir(), 20, 1, func(c *Config) { c.Policies.Evict = handle(module) })
	f.mustPut(0, 1, 2)
	r := f.root()
	r.Lock()
	r.BeginScan()
	r.Index.Each(func(_ uint32, e *index.Entry) { e.Unset(index.Announced) })
	r.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.recovery.newScan().End(ctx, func(int64) {})
	told = 0
	f.restart()
	_ = f.root().Evictor.Flush()
	if st := f.store.Stats().Roots[0]; st.Scanned != 3 || told != 3 {
		t.Errorf("%d files were scanned, and the policy told of %d entries", st.Scanned, told)
	}
	f.mustRead(2)
}
