package fsck

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/host/internal/testkit/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"github.com/zeebo/xxh3"
)

func TestSoundRoot(t *testing.T) {
	r := newRig(t, 1<<30)
	r.mustPut(1, 2, 3)
	var files atomic.Int64
	report := r.check(Options{Progress: func(n, _ int64) { files.Add(n) }})
	if report.Err() != nil || report.Pieces.Files != 3 || len(report.Problems) != 0 || len(report.Spaces) != 1 ||
		report.Spaces[0].Model != "test/model" {
		t.Errorf("check of a sound root: %+v, want 3 pieces of test/model and no problem", report)
	}
	if n, err := Files(context.Background(), r.dir, nil); err != nil || n != files.Load() {
		t.Errorf("%d files counted, %d gone through, %v", n, files.Load(), err)
	}
	if used := r.store.Stats().Roots[0].Used; report.Pieces.Bytes != used {
		t.Errorf("%d bytes, the host's account says %d", report.Pieces.Bytes, used)
	}
	quick := r.check(Options{Quick: true})
	if quick.Err() != nil || quick.Pieces != report.Pieces || quick.Read != 3*pieceformat.Page {
		t.Errorf("quick: %+v", quick)
	}
}

// TestBucket checks objects as files, repairs them under the bucket's lock, and refuses that while another has it.
func TestBucket(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	r := newRig(t, 1<<30)
	r.mustPut(1, 2, 3)
	s := s3double.Start(t)
	must(t, filepath.WalkDir(r.dir, func(name string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() && e.Name() != filepath.Base(pieceformat.LockFile) {
			b, err := os.ReadFile(name)
			must(t, err)
			s.Set("kv/"+strings.TrimPrefix(name, r.dir+"/"), b)
		}
		return err
	}))
	damaged := strings.TrimPrefix(r.pieces(4)[2], r.dir+"/")
	open := func() *s3fs.FS {
		f, err := s3fs.Open(s3fs.Config{Path: "s3://bucket/kv", Endpoint: s.URL, PathStyle: true, Target: pieceformat.Target, Term: 2 * time.Second})
		must(t, err)
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	fsys := open()
	check := func(o Options) *Report {
		t.Helper()
		o.FS, o.Alone = fsys, true
		report, err := Check(t.Context(), "s3://bucket/kv", o)
		must(t, err)
		return report
	}
	if sound := check(Options{}); sound.Err() != nil || sound.Pieces.Files != 3 || sound.InUse || sound.Read < sound.Pieces.Bytes {
		t.Errorf("check of a sound bucket: %+v, want 3 pieces that were read and no problem", sound)
	}
	body := bytes.Clone(s.Objects()["kv/"+damaged].Body)
	body[2*pieceformat.Page+5] ^= 1
	s.Set("kv/"+damaged, body)
	if quick := check(Options{Quick: true}); quick.Err() != nil || quick.Read != 3*pieceformat.Page {
		t.Errorf("quick: %+v, want three heads and no problem", quick)
	}
	if found := check(Options{}); !maps.Equal(kinds(found), map[string]Kind{"s3:/bucket/kv/" + damaged: Damaged}) {
		t.Errorf("found %v, want %s damaged", kinds(found), damaged)
	}
	host, err := open().Lock("s3://bucket/kv/" + pieceformat.LockFile)
	must(t, err)
	if _, err := Check(t.Context(), "s3://bucket/kv", Options{FS: fsys, Alone: true, Repair: true}); !errors.Is(err, staging.ErrLocked) {
		t.Errorf("repair of a bucket in use: %v, want %v", err, staging.ErrLocked)
	}
	if used := check(Options{Quick: true}); !used.InUse {
		t.Error("the report of a bucket in use does not say so")
	}
	must(t, host.Close())
	const member = "kv/" + shared.Dir + "/hosts/other.1"
	s.Set(member, []byte("{}"))
	if _, err := Check(t.Context(), "s3://bucket/kv", Options{FS: fsys, Alone: true, Repair: true}); !errors.Is(err, staging.ErrLocked) ||
		!strings.Contains(err.Error(), "other.1") {
		t.Errorf("repair of a bucket that hosts share: %v, want %v by other.1", err, staging.ErrLocked)
	}
	if used := check(Options{Quick: true}); !used.InUse {
		t.Error("the report of a bucket that hosts share does not say that it is in use")
	}
	must(t, fsys.Control("s3://bucket/kv/"+shared.Dir, time.Second).Remove("hosts/other.1"))
	if repaired := check(Options{Repair: true}); repaired.Err() != nil || repaired.Repaired != 1 {
		t.Errorf("repair: %+v, want one object repaired", repaired)
	}
	if after := check(Options{}); after.Err() != nil || after.Pieces.Files != 2 || after.Quarantine.Files != 1 || after.InUse {
		t.Errorf("after the repair: %+v, want 2 pieces and one in quarantine", after)
	}
}

// TestEachKindOfDamage has a file of each kind, judges them, and repairs them.
func TestEachKindOfDamage(t *testing.T) {
	r := newRig(t, 1<<30)
	const most = 12
	for n := range uint64(most) {
		r.mustPut(n)
	}
	names := r.pieces(most)
	r.store.Close()
	want := map[string]Kind{}
	spoil := func(n uint64, kind Kind, how func(b []byte) []byte) {
		r.change(names[n], how)
		want[names[n]] = kind
	}
	spoil(1, Damaged, func(b []byte) []byte { return b[:100] })
	spoil(2, Damaged, func(b []byte) []byte { return b[:len(b)-pieceformat.Page] })
	spoil(3, Damaged, func(b []byte) []byte { b[96] ^= 1; return b })               // header
	spoil(4, Damaged, func(b []byte) []byte { b[pieceformat.Page] ^= 1; return b }) // table
	// last byte of some extent
	spoil(5, Damaged, func(b []byte) []byte { b[2*pieceformat.Page+79_999] ^= 1; return b })
	spoil(6, Later, func(b []byte) []byte { b[8] = 9; return b })                                 // version
	spoil(7, Orphan, func(b []byte) []byte { copy(b[16:], "another space..."); return resum(b) }) // namespace
	spoil(8, NoPlan, func(b []byte) []byte { copy(b[144:], "another plan...."); return resum(b) })
	nine, err := os.ReadFile(names[9])
	must(t, err)
	spoil(10, WrongPiece, func([]byte) []byte { return slices.Clone(nine) })
	orphan := filepath.Join(r.dir, "stray-piece")
	put := func(name string, b []byte) {
		must(t, os.MkdirAll(filepath.Dir(name), 0o700))
		must(t, os.WriteFile(name, b, 0o600))
	}
	stranger := slices.Clone(nine)
	copy(stranger[16:], "another space...")
	put(orphan, resum(stranger))
	want[orphan] = Orphan
	put(filepath.Join(r.dir, "README.txt"), []byte("notes"))
	temp := filepath.Join(filepath.Dir(names[1]), ".x.kv."+hostID+".1f.tmp")
	put(temp, make([]byte, 5000))
	for _, dir := range []string{pieceformat.NamespacesDir, pieceformat.PlansDir} {
		name := filepath.Join(r.dir, dir, strings.Repeat("ab", 16))
		put(name, []byte("junk"))
		want[name] = Meta
	}
	written := filepath.Join(r.dir, pieceformat.WrittenFile)
	put(written, []byte("junk"))
	want[written] = Meta

	before := r.check(Options{})
	if got := kinds(before); !maps.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	if !errors.Is(before.Err(), ErrProblems) || before.Remaining != int64(len(want)) || before.Foreign.Files != 1 ||
		before.Temporaries.Files != 1 || before.Pieces.Files != 3 {
		t.Errorf("check before the repair: %+v, want %d problems, 3 pieces, a foreign file and a temporary", before, len(want))
	}
	if again := r.check(Options{}); !maps.Equal(kinds(again), want) {
		t.Error("a check changed something")
	}
	quick := r.check(Options{Quick: true})
	headers := maps.Clone(want)
	delete(headers, names[4])
	delete(headers, names[5])
	if got := kinds(quick); !maps.Equal(got, headers) {
		t.Errorf("by headers only: %v, want %v", got, headers)
	}
	if stale := r.check(Options{TempAge: 1}); kinds(stale)[temp] != Stale {
		t.Errorf("an old temporary is no problem: %v", kinds(stale))
	}

	fixed := r.check(Options{Repair: true})
	for _, p := range fixed.Problems {
		if (p.Done == "") != (p.Kind == Later) || p.Failed != "" {
			t.Errorf("after a repair: problem %+v, want it repaired unless its format is later", p)
		}
	}
	if fixed.Repaired != int64(len(want)) || fixed.Remaining != 1 {
		t.Errorf("%d repaired and %d remain", fixed.Repaired, fixed.Remaining)
	}
	if _, err := os.Stat(temp); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the temporary: %v", err)
	}
	if after := r.check(Options{}); after.Remaining != 1 || after.Quarantine.Files != int64(len(want)-1) ||
		after.Pieces != before.Pieces {
		t.Errorf("after the repair: %+v", after)
	}
	r.open(1 << 30)
	for n := range uint64(most) {
		if got, want := r.hit(n), n == 0 || n == 9 || n == 11; got != want {
			t.Errorf("key %d: hit %t", n, got)
		}
	}
}

// TestRepairBesideIdleHost: a host that is told nothing finds a quarantined file gone, and accounts for it.
func TestRepairBesideIdleHost(t *testing.T) {
	r := newRig(t, 1<<30)
	r.mustPut(1, 2, 3)
	names := r.pieces(4)
	r.change(names[2], func(b []byte) []byte { b[len(b)-pieceformat.Page] ^= 1; return b })
	temp := filepath.Join(filepath.Dir(names[1]), ".x.kv."+hostID+".1f.tmp")
	must(t, os.WriteFile(temp, make([]byte, 5000), 0o600))
	used := r.store.Stats().Roots[0].Used
	report := r.check(Options{Repair: true, TempAge: 1})
	if report.Repaired != 1 || report.Remaining != 0 || !report.InUse {
		t.Errorf("repair next to a host: %+v, want one problem repaired and the root in use", report)
	}
	if _, err := os.Stat(temp); err != nil {
		t.Errorf("a temporary that its host may be writing: %v", err)
	}
	for range 2 { // when its file is met gone, and when that is known
		if r.hit(2) || !r.hit(1) {
			t.Error("the damaged piece is a hit, or a sound one is not")
		}
	}
	st := r.store.Stats().Roots[0]
	if st.Used != used || st.Held == 0 || st.Vanished == 0 {
		t.Errorf("%d bytes used before, now %+v", used, st)
	}
	r.mustPut(2)
	if !r.hit(2) {
		t.Error("stored again, and a miss")
	}
}

// TestRepairKeepsTheAccount: in whatever way a running host finds that a repair has moved a file, the bytes stay in its account.
func TestRepairKeepsTheAccount(t *testing.T) {
	const most = 20
	for _, c := range []struct {
		how  string
		find func(r *rig, faulty *faultfs.FS, read func()) // has the host of key 2 find it
	}{
		{"looked up", func(r *rig, _ *faultfs.FS, _ func()) { r.hit(2) }},
		{"being read", func(_ *rig, _ *faultfs.FS, read func()) { read() }},
		{"evicted", func(r *rig, _ *faultfs.FS, _ func()) { r.mustPut(most+2, most+3, most+4, most+5) }},
		{"found without descriptors", func(r *rig, faulty *faultfs.FS, _ func()) {
			faulty.Set(faultfs.MustRules("readdir **: emfile")...)
			r.hit(2)
			faulty.Set()
			testenv.Until(r, "a file in quarantine", func() bool { return r.store.Stats().Roots[0].Held > 0 })
		}},
	} {
		t.Run(c.how, func(t *testing.T) {
			faulty := faultfs.New(staging.OS())
			r := newRig(t, 1<<30)
			r.store.Close()
			r.openRoot(store.RootConfig{Path: r.dir, Capacity: most * (50 << 12), Medium: store.Medium{FS: faulty}})
			for n := range uint64(most) {
				r.mustPut(n + 2)
			}
			l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{key(2)}})
			must(t, err)
			reader, err := l.Open(0, 0)
			must(t, err)
			l.Release()
			r.change(r.pieces(3)[2], func(b []byte) []byte { b[len(b)-pieceformat.Page] ^= 1; return b })
			if report := r.check(Options{Repair: true}); report.Repaired != 1 {
				t.Fatalf("repair: %+v, want one file moved to the quarantine", report)
			}
			c.find(r, faulty, func() { reader.Bad(pieceformat.ErrDamaged) })
			reader.Close()
			r.accounts(c.how)
		})
	}
	t.Run("during a scan", func(t *testing.T) {
		r := newRig(t, 1<<30)
		r.mustPut(1, 2, 3)
		name := r.pieces(4)[2]
		r.change(name, func(b []byte) []byte { b[len(b)-pieceformat.Page] ^= 1; return b })
		r.store.Close()
		must(t, os.Remove(filepath.Join(r.dir, pieceformat.CheckpointFile)))
		r.openRoot(store.RootConfig{Path: r.dir, Capacity: 1 << 30, Medium: store.Medium{FS: &meanwhile{FS: staging.OS(),
			dir: filepath.Dir(name), then: func() { r.check(Options{Repair: true}) }}}})
		<-r.store.ScanDone()
		r.accounts("after the scan")
	})
}

// accounts says when the host's account is not of what is in the root, one file of it in the quarantine.
func (r *rig) accounts(when string) {
	r.Helper()
	disk := r.check(Options{})
	if used := r.store.Stats().Roots[0].Used; used != disk.Pieces.Bytes+disk.Quarantine.Bytes || disk.Quarantine.Files != 1 {
		r.Errorf("%s: the account says %d bytes, want those of %+v in service and %+v in quarantine, one file", when, used,
			disk.Pieces, disk.Quarantine)
	}
}

// TestBesideBusyHost repairs again and again while a host stores, evicts and takes victims' files over. Nothing is
// damaged, so nothing may be found.
func TestBesideBusyHost(t *testing.T) {
	r := newRig(t, 64*(50<<12))
	done := make(chan error, 1)
	var puts atomic.Int64
	const stores = 120 // more than there is room for
	go func() {
		g := rand.New(rand.NewPCG(1, 1))
		for puts.Add(1) < stores {
			if err := r.put(g.Uint64N(200)); err != nil && !errors.Is(err, store.ErrResident) {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for puts.Load() < stores && !t.Failed() {
		report := r.check(Options{Repair: true, TempAge: 1, Workers: 4})
		if len(report.Problems) != 0 || report.Remaining != 0 {
			t.Errorf("check while pieces are replaced: problems %+v, want none", report.Problems)
		}
	}
	must(t, <-done)
	st := r.store.Stats().Roots[0]
	if st.Vanished != 0 || st.Damaged != 0 || st.Recycled == 0 || st.Evictions == 0 {
		t.Errorf("the host has seen %d vanished and %d damaged files, %d recycled, %d evictions; want none, none, some, some", st.Vanished, st.Damaged, st.Recycled, st.Evictions)
	}
}

// TestReadWhileItIsEvicted: what a host evicts while a check reads it keeps its name, and its bytes their place in the account, until the check
// is done with it.
func TestReadWhileItIsEvicted(t *testing.T) {
	const most = 8
	r := newRig(t, 1<<30)
	r.store.Close()
	r.openRoot(store.RootConfig{Path: r.dir, Capacity: most * (50 << 12), ForPieces: true,
		Medium: store.Medium{Traits: store.Traits{WriteOnce: true}}}) // no put takes over a victim's file
	for n := range uint64(most) {
		r.mustPut(n)
	}
	first := r.pieces(most)[0]
	taken := func() (sum int64) {
		must(t, filepath.WalkDir(r.dir, func(name string, e fs.DirEntry, err error) error {
			if info, serr := staging.OS().Stat(name); err == nil && serr == nil && strings.HasSuffix(name, ".kv") {
				sum += info.Allocated
			}
			return nil
		}))
		return sum
	}
	evicted := false
	r.check(Options{Repair: true, Workers: 1, FS: &reading{FS: staging.OS(), name: first, then: func(f staging.File) {
		r.mustPut(most, most+1, most+2)
		evicted = !r.hit(0)
		info, err := f.Stat()
		must(t, err)
		sum := taken()
		if info.Links == 0 {
			sum += info.Allocated
		}
		if st := r.store.Stats().Roots[0]; sum > st.Capacity || st.Used < sum {
			t.Errorf("%d bytes are taken, with what is read, the account says %d of %d", sum, st.Used, st.Capacity)
		}
	}}})
	if !evicted || t.Failed() {
		t.Fatalf("what was read was evicted: %t", evicted)
	}
	testenv.Until(t, "it goes afterwards, from the account too", func() bool {
		_, err := os.Stat(first)
		return errors.Is(err, os.ErrNotExist) && r.store.Stats().Roots[0].Used == taken()
	})
}

// reading runs a function at the first read of a file.
type reading struct {
	staging.FS
	name string
	then func(staging.File)
}

func (f *reading) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	file, err := f.FS.OpenFile(name, flag, perm)
	if err == nil && filepath.Clean(name) == f.name && f.then != nil {
		then := f.then
		f.then = nil
		return &readFile{file, func() { then(file) }}, nil
	}
	return file, err
}

type readFile struct {
	staging.File
	first func()
}

func (f *readFile) ReadAt(p []byte, off int64) (int, error) {
	if f.first != nil {
		first := f.first
		f.first = nil
		first()
	}
	return f.File.ReadAt(p, off)
}

// TestSharedTemporaries: where hosts share a root a young temporary is left alone although no lock is held.
func TestSharedTemporaries(t *testing.T) {
	r := newRig(t, 1<<30)
	r.mustPut(1)
	r.store.Close()
	young, old := filepath.Join(r.dir, ".a.kv.other.1.tmp"), filepath.Join(r.dir, ".b.kv.other.2.tmp")
	for _, name := range []string{young, old, filepath.Join(r.dir, pieceformat.LockFile+".other")} {
		must(t, os.WriteFile(name, nil, 0o600))
	}
	then := time.Now().Add(-2 * time.Hour)
	must(t, os.Chtimes(old, then, then))
	lock, err := staging.OS().Lock(filepath.Join(r.dir, pieceformat.LockFile+".other"))
	must(t, err)
	if report := r.check(Options{Repair: true}); report.Repaired != 0 || !report.InUse {
		t.Errorf("its owner lives: %+v", report)
	}
	lock.Close()
	report := r.check(Options{Repair: true})
	if _, err := os.Stat(young); err != nil || report.Repaired != 1 {
		t.Errorf("a young temporary: error %v, report %+v, want it left and the old one removed", err, report)
	}
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old one: %v", err)
	}
}

// TestUnreadable: an error of the device is no damage.
func TestUnreadable(t *testing.T) {
	r := newRig(t, 1<<30)
	r.mustPut(1, 2)
	names := r.pieces(3)
	faulty := faultfs.New(staging.OS(), faultfs.MustRules("read **"+filepath.Base(names[1])+": eio")...)
	report := r.check(Options{FS: faulty, Repair: true})
	if got := kinds(report); len(got) != 1 || got[names[1]] != Unreadable || report.Remaining != 1 ||
		report.Repaired != 0 {
		t.Errorf("a file that cannot be read: kinds %v, report %+v, want it unreadable and not repaired", got, report)
	}
	if _, err := os.Stat(names[1]); err != nil {
		t.Error(err)
	}
}

// TestReplacedUnderTheRepair gives the name to another file between the check and the rename. It stays where its host
// counts it: a host that missed it meanwhile would not count it under its name.
func TestReplacedUnderTheRepair(t *testing.T) {
	r := newRig(t, 1<<30)
	r.mustPut(1)
	name := r.pieces(2)[1]
	sound, err := os.ReadFile(name)
	must(t, err)
	r.change(name, func(b []byte) []byte { b[len(b)-pieceformat.Page] ^= 1; return b })
	fsys := &replacing{FS: staging.OS(), before: func() {
		testenv.NoError(t, os.Remove(name))
		testenv.NoError(t, os.WriteFile(name+".new", sound, 0o600))
		testenv.NoError(t, os.Rename(name+".new", name))
	}}
	report := r.check(Options{FS: fsys, Repair: true})
	if report.Repaired != 1 || report.Quarantine.Files != 1 {
		t.Errorf("a file that is replaced during a repair: %+v, want it in quarantine", report)
	}
	if r.hit(1) {
		t.Error("a file that is in quarantine is served")
	}
	if used := r.store.Stats().Roots[0].Used; used != report.Quarantine.Bytes {
		t.Errorf("the host's account says %d bytes, the quarantine has %d", used, report.Quarantine.Bytes)
	}
}

// replacing runs a function before the first rename.
type replacing struct {
	staging.FS
	before func()
}

func (f *replacing) RenameNoReplace(from, to string) error {
	if f.before != nil {
		f.before()
		f.before = nil
	}
	return f.FS.RenameNoReplace(from, to)
}

func TestNotARoot(t *testing.T) {
	for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "missing")} {
		if _, err := Check(context.Background(), dir, Options{}); !errors.Is(err, ErrRoot) ||
			!strings.Contains(err.Error(), dir) {
			t.Errorf("check of %s, which is no root: error %v, want %v that names it", dir, err, ErrRoot)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := newRig(t, 1<<30)
	r.mustPut(1)
	cancel()
	if _, err := Check(ctx, r.dir, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// meanwhile is a file system on which something happens when a directory is listed.
type meanwhile struct {
	staging.FS
	dir  string
	then func()
	once sync.Once
}

func (m *meanwhile) ReadDir(name string) ([]fs.DirEntry, error) {
	if filepath.Clean(name) == m.dir {
		m.once.Do(m.then)
	}
	return m.FS.ReadDir(name)
}

// TestNamespaceOpenedMeanwhile has a host open its first namespace when the check has read what is kept and goes for
// the pieces. They are sound, and stay.
func TestNamespaceOpenedMeanwhile(t *testing.T) {
	r := newRig(t, 1<<30)
	ctx := context.Background()
	report := r.check(Options{Repair: true, FS: &meanwhile{FS: staging.OS(), dir: r.dir, then: func() {
		ns := &kv.Namespace{
			Model: "test/other", Revision: "1", DType: "fp8", Engine: "test", HashAlgorithm: "sha256", KeyBytes: 32,
			TokensPerBlock: 16,
			TensorParallel: 1, Groups: []kv.Group{{ID: 0, Geometry: kv.Uniform(2, 4, 2, 5000)}},
		}
		var err error
		r.space, err = r.store.Namespace(ctx, ns)
		must(t, err)
		r.mustPut(1, 2, 3)
	}}})
	if len(report.Problems) != 0 || report.Pieces.Files != 3 {
		t.Errorf("a namespace that is opened during a check: %+v, want 3 pieces and no problem", report)
	}
	for n := range uint64(3) {
		if !r.hit(n + 1) {
			t.Errorf("key %d is a miss", n+1)
		}
	}
}

// TestTextCannotBeRead: pieces of a namespace whose text gives an error are nobody's orphans.
func TestTextCannotBeRead(t *testing.T) {
	for _, dir := range []string{pieceformat.NamespacesDir, pieceformat.PlansDir} {
		r := newRig(t, 1<<30)
		r.mustPut(1, 2, 3)
		faulty := faultfs.New(staging.OS())
		faulty.Set(faultfs.MustRules("read **/.kvhost**/" + path.Base(dir) + "/*: eio")...)
		report := r.check(Options{Repair: true, FS: faulty})
		if u := report.Found[Unreadable]; len(report.Found) != 1 || u == nil || u.Files != 5 || report.Repaired != 0 {
			t.Errorf("%s cannot be read: report %+v, want 5 unreadable files and none repaired", dir, report)
		}
		for n := range uint64(3) {
			if !r.hit(n + 1) {
				t.Errorf("%s: key %d is a miss", dir, n+1)
			}
		}
	}
}

// TestLinkedFilesCountOnce gives a piece two more names: one among the pieces and one among files of others.
func TestLinkedFilesCountOnce(t *testing.T) {
	r := newRig(t, 1<<30)
	r.mustPut(1, 2)
	want := r.check(Options{})
	for _, name := range []string{"another.kv", "other/notes"} {
		name = filepath.Join(r.dir, name)
		must(t, errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.Link(r.pieces(3)[1], name)))
	}
	got := r.check(Options{})
	if bytes := got.Pieces.Bytes + got.Foreign.Bytes; bytes != want.Pieces.Bytes || got.Pieces.Files+got.Foreign.Files != 4 {
		t.Errorf("%+v and %+v, want %d bytes", got.Pieces, got.Foreign, want.Pieces.Bytes)
	}
}

// TestCompressedPieces verifies compressed pieces: a flipped bit, a table that contradicts itself, and extents that have the
// right checksums and are not what an encoder writes, or decode to other pages.
func TestCompressedPieces(t *testing.T) {
	r := newRig(t, 1<<30)
	r.store.Close()
	r.openRoot(store.RootConfig{Path: r.dir, Capacity: 1 << 30, Compressed: true})
	const most = 8
	for n := range uint64(most) {
		p, err := r.store.Put(context.Background(), store.PutRequest{Namespace: r.space, Key: key(n)})
		must(t, err)
		payload := []byte(strings.Repeat("KV", int(p.Plan().PayloadBytes()/2)))
		payload[n*50+7]++ // or its planes repeat one byte
		must(t, storetest.StorePut(context.Background(), r.slots, p, payload))
	}
	names := r.pieces(most)
	report := r.check(Options{})
	if report.Err() != nil || report.Compressed.Files != most || report.Compressed.Bytes != report.Pieces.Bytes ||
		report.Compressed.Payload < 3*report.Compressed.Bytes || report.Pieces.Bytes != r.store.Stats().Roots[0].Used {
		t.Errorf("check of compressed pieces: %+v, want %d of them and all bytes in use", report, most)
	}
	r.store.Close()

	const table = pieceformat.Page
	want := map[string]Kind{}
	spoil := func(n uint64, kind Kind, how func(b []byte, h *pieceformat.Header)) {
		r.change(names[n], func(b []byte) []byte {
			h, err := pieceformat.DecodeHeader(b)
			must(t, err)
			how(b, &h)
			return b
		})
		want[names[n]] = kind
	}
	// sum makes the checksums of the first extent, of the table and of the header right again.
	sum := func(b []byte, h *pieceformat.Header) {
		le := binary.LittleEndian
		le.PutUint64(b[table+8:], kv.Sum(b[h.DataOffset:][:le.Uint32(b[table+16:])]))
		h.TableSum = xxh3.Hash(b[table:][:24*h.Extents])
		h.Encode(b)
	}
	spoil(1, Damaged, func(b []byte, h *pieceformat.Header) { b[h.DataOffset+3] ^= 4 })
	spoil(2, Damaged, func(b []byte, h *pieceformat.Header) { b[table+16]--; sum(b, h) })
	spoil(3, Damaged, func(b []byte, h *pieceformat.Header) { b[h.DataOffset] = 99; sum(b, h) })
	spoil(4, Damaged, func(b []byte, h *pieceformat.Header) { b[table]++; sum(b, h) })
	spoil(5, Later, func(b []byte, h *pieceformat.Header) { b[table+20] = 77; sum(b, h) })
	if got := kinds(r.check(Options{})); !maps.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	if quick := r.check(Options{Quick: true}); len(quick.Problems) != 0 || quick.Compressed.Files != most {
		t.Errorf("by headers only: %+v", quick)
	}
}

// TestWhatTheNextStartGoesBy damages the files of a closed root that spare the next start its scan, or that tell it how
// earlier place policies named files.
func TestWhatTheNextStartGoesBy(t *testing.T) {
	r := newRig(t, 1<<30)
	r.mustPut(1, 2, 3)
	must(t, r.store.Close())
	if report := r.check(Options{}); len(report.Problems) != 0 {
		t.Fatalf("before: %+v", report.Problems)
	}
	want := map[string]Kind{}
	spoil := func(rel, text string) {
		t.Helper()
		name := filepath.Join(r.dir, rel)
		if text == "" {
			r.change(name, func(b []byte) []byte { b[len(b)-1] ^= 1; return b })
		} else if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		want[name] = Meta
	}
	spoil(pieceformat.CheckpointFile, "")
	spoil(pieceformat.StateFile, "kvstate1 and what is no state")
	spoil(pieceformat.WrittenFile, "many")
	if got := kinds(r.check(Options{})); !maps.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	for _, p := range r.check(Options{Repair: true}).Problems {
		if p.Done == "" || p.Failed != "" {
			t.Errorf("after a repair: problem %+v, want it repaired", p)
		}
	}
	if report := r.check(Options{}); len(report.Problems) != 0 {
		t.Errorf("after the repair: %+v", report.Problems)
	}
	r.open(1 << 30)
	for n := uint64(1); n <= 3; n++ {
		if !r.hit(n) {
			t.Errorf("key %d is a miss after the repair", n)
		}
	}
}

// TestCheckpointOfNoIndex: a checkpoint with a right checksum is a problem where a start would refuse its records.
func TestCheckpointOfNoIndex(t *testing.T) {
	r := newRig(t, 1<<30)
	r.mustPut(1)
	must(t, r.store.Close())
	name := filepath.Join(r.dir, pieceformat.CheckpointFile)
	f, err := os.OpenFile(name, os.O_RDWR|os.O_TRUNC, 0o600)
	must(t, err)
	defer f.Close()
	entries := []pieceformat.CheckpointEntry{{Slot: 5, Pieces: 1, Key: key(1)}, {Slot: 3, Pieces: 1, Key: key(2)}} // slots rise
	must(t, pieceformat.WriteCheckpoint(f, pieceformat.Checkpoint{High: 6, Entries: 2}, make([]pieceformat.CheckpointOwner, 1),
		func(yield func(*pieceformat.CheckpointEntry) bool) {
			for i := range entries {
				if !yield(&entries[i]) {
					return
				}
			}
		}))
	if got := kinds(r.check(Options{})); !maps.Equal(got, map[string]Kind{name: Meta}) {
		t.Errorf("found %v, want the checkpoint alone", got)
	}
}

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
	r.slots, err = staging.NewSlots(1, 1<<20)
	must(t, err)
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
	r.space, err = r.store.Namespace(ctx, ns)
	must(r, err)
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
	return storetest.StorePut(ctx, r.slots, p, payload)
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
var must = testenv.OK
