package store

import (
	"context"
	"encoding/binary"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/staging"
)

// BenchmarkScan opens a root of KVHOST_FILES sparse pieces without its checkpoint.
func BenchmarkScan(b *testing.B) {
	files := sized(b, "KVHOST_FILES", 2000)
	f := newFixtureIn(b, b.TempDir(), files+8, 1, func(c *Config) { c.ScanWait = time.Hour })
	f.mustPut(0)
	page, err := os.ReadFile(f.pieceFile(0, 0))
	must(b, err)
	h, err := pieceformat.DecodeHeader(page)
	must(b, err)
	for n := range uint64(files - 1) {
		h.Parent, h.Key, h.Depth, h.StoreTime = h.Key, testKey(n+1), uint32(n+1), h.StoreTime+1
		h.Encode(page)
		name := f.pieceFile(n+1, 0)
		put(b, name, page[:pieceformat.Page])
		must(b, os.Truncate(name, h.FileBytes()))
	}
	// else the first durable thing waits for all of them
	must(b, f.root().FS.SyncFS(f.cfg.Roots[0].Path))
	file := filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)
	var cpu time.Duration
	for b.Loop() {
		b.StopTimer()
		must(b, f.store.Close())
		_ = os.Remove(file)
		b.StartTimer()
		before := cpuTime()
		f.start()
		cpu += cpuTime() - before
	}
	b.ReportMetric(float64(cpu.Milliseconds())/float64(b.N), "cpu-ms/op")
	if st := f.store.Stats().Roots[0]; st.Entries != files || st.Scanned == 0 {
		b.Fatalf("a start found %d entries and scanned %d, want %d entries", st.Entries, st.Scanned, files)
	}
}

// cpuTime is what this process has used, which neighbours on the machine change less than the time on the clock.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// hashKey is a key as cheap to make as there is, of 16 or 32 bytes.
func hashKey(n uint64, bytes int) (k kv.Key) {
	for i := 0; i < bytes; i += 8 {
		binary.LittleEndian.PutUint64(k[i:],
			xxh3.HashSeed(binary.LittleEndian.AppendUint64(make([]byte, 0, 8), n), uint64(i)))
	}
	return k
}

// indexOnly is a store over an empty directory whose index is filled directly: no files.
func indexOnly(b testing.TB, entries, keyBytes int, change ...func(*Config)) *fixture {
	f := &fixture{TB: b, ns: testNamespace(1)}
	f.ns.KeyBytes = keyBytes
	f.cfg = Config{
		Roots: []RootConfig{{
			Path: b.TempDir(), Capacity: int64(entries) * pieceBytes, MaxEntries: uint32(entries + 8),
			ForPieces: true, // no directories are counted while the test replaces the file system
		}},
		Log: slog.New(slog.DiscardHandler),
	}
	for _, c := range change {
		c(&f.cfg)
	}
	f.start()
	return f
}

// fill adds chains of 1,000 chunks.
func (f *fixture) fill(entries, keyBytes int) {
	r, c := f.root(), f.space.Class(0)
	r.Lock()
	defer r.Unlock()
	f.store.catalog.Tenants.Number(0)
	owner, _ := r.Index.InternOwner(index.Owner{Class: c.ID})
	restoring := r.Index.Restore(entries)
	e := pieceformat.CheckpointEntry{OwnerID: owner, State: index.Complete, Units: pieceBytes / pieceformat.Page, Pieces: 1}
	for n := range uint32(entries) {
		if n%1000 == 0 {
			e.Parent = 0
		}
		e.Slot, e.LastTouch, e.Depth, e.Key = n, n+1, uint16(n%1000), hashKey(uint64(n), keyBytes)
		must(f, restoring.Enter(&e))
		e.Parent = r.Index.Fingerprint(n)
		c.Ref()
		r.Account.Commit(0, pieceBytes)
		r.Index.At(n).Set(index.Announced)
		r.Evictor.Tell(abi.OpInsert, n, e.Parent, 0)
	}
	must(f, restoring.End(uint32(entries), uint32(entries)))
}

// sized reads a size from the environment: benchmarks are short unless told otherwise.
func sized(b *testing.B, name string, short int) int {
	v := os.Getenv(name)
	if v == "" {
		return short
	}
	n, err := strconv.Atoi(v)
	must(b, err)
	return n
}

// deaf is a policy that does nothing with what it is told: what is left of a lookup is the index's own.
type deaf struct{}

func (deaf) Events([]abi.Event)            {}
func (deaf) Victims(abi.Ask, []uint32) int { return 0 }

// BenchmarkEntries measures what could grow with the number of entries, KVHOST_ENTRIES: leases on prefixes of 1,000
// chunks, with the built-in policy and with one that takes no time; puts in a full root; checkpoints; and starts.
func BenchmarkEntries(b *testing.B) {
	entries := sized(b, "KVHOST_ENTRIES", 1<<18)
	b.Run(fmt.Sprintf("entries=%d/no-policy", entries), func(b *testing.B) {
		f := indexOnly(b, entries, 32, func(c *Config) {
			c.Policies.Evict = handle(policy.NativeModule("deaf", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) {
				return deaf{}, nil
			}))
		})
		f.fill(entries, 32)
		b.Run("lookup", func(b *testing.B) { f.benchLookups(b, entries, 0) })
		f.abandon()
	})
	b.Run(fmt.Sprintf("entries=%d/lru", entries), func(b *testing.B) {
		f := indexOnly(b, entries, 32)
		f.fill(entries, 32)
		b.Run("lookup", func(b *testing.B) { f.benchLookups(b, entries, 0) })
		// As an engine does whose first answer came before it had room.
		b.Run("lookup-again", func(b *testing.B) { f.benchLookups(b, entries, 1) })
		b.Run("checkpoint-write", f.benchWriteCheckpoint)
		b.Run("checkpoint-read", func(b *testing.B) { f.benchReadCheckpoint(b, entries) })
		b.Run("start", func(b *testing.B) { f.benchStart(b, entries) })
		b.Run("reserve", func(b *testing.B) { f.benchReserve(b, uint64(entries)) })
		f.abandon()
	})
}

// abandon ends a store of which nothing is kept: with 10^8 entries an orderly end takes a minute.
func (f *fixture) abandon() {
	f.store.closed.Store(true)
	f.store.stop()
	f.store.work.Wait()
}

func (f *fixture) benchLookups(b *testing.B, entries int, request uint32) {
	const chain = 1000
	lists := make([][]kv.Key, min(64, entries/chain))
	for i := range lists {
		at := uint64(i * (entries / chain / len(lists)) * chain)
		for n := range uint64(chain) {
			lists[i] = append(lists[i], hashKey(at+n, 32))
		}
	}
	b.ReportAllocs()
	cpu := cpuTime()
	leases := make([]*Lease, 0, len(lists))
	i := 0
	for b.Loop() {
		q := LookupRequest{Namespace: f.space, Keys: lists[i%len(lists)]}
		if request != 0 {
			q.Request = uint32(i%len(lists)) + 1
		}
		l, err := f.store.Lookup(q)
		if err != nil || l.Hits() != chain {
			b.Fatal(l.Hits(), err)
		}
		if leases = append(leases, l); len(leases) == len(lists) {
			b.StopTimer()
			before := cpuTime()
			for _, l := range leases {
				l.Release()
			}
			leases = leases[:0]
			cpu += cpuTime() - before
			b.StartTimer()
		}
		i++
	}
	b.ReportMetric(float64(cpuTime()-cpu)/float64(b.N), "cpu-ns/op")
	for _, l := range leases {
		l.Release()
	}
}

func (f *fixture) benchWriteCheckpoint(b *testing.B) {
	r := f.root()
	for b.Loop() {
		must(b, r.kept.Replace(pieceformat.CheckpointFile, func(f staging.File) error {
			return writeCheckpoint(f, r.Index, 1, r.kept.owners(r.Index))
		}))
	}
}

func (f *fixture) benchReadCheckpoint(b *testing.B, entries int) {
	r := f.root()
	file, err := r.FS.OpenFile(r.Path+"/"+pieceformat.CheckpointFile, os.O_RDONLY, 0)
	must(b, err)
	defer file.Close()
	info, err := file.Stat()
	must(b, err)
	for b.Loop() {
		x := index.New(r.cfg.MaxEntries, f.store.catalog.Fingerprint, f.store.catalog.Base)
		owner := func(o *pieceformat.CheckpointOwner) (index.Owner, error) {
			cl, err := f.store.catalog.ClassFor(&pieceformat.Header{Namespace: o.Namespace, Group: o.Group})
			return index.Owner{Class: cl.ID}, err
		}
		if _, err := readCheckpoint(file, info.Size, x, owner); err != nil || x.Len() != r.Index.Len() {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(info.Size)/float64(entries), "file-B/entry")
}

// benchStart opens the root by its checkpoint, up to the first answer. A start compares a sample of the entries with
// their files: each of those has one.
func (f *fixture) benchStart(b *testing.B, entries int) {
	r := f.root()
	for slot := range r.Index.High() {
		if (slot+1)%max(1, r.Index.High()/SampledEntries) != 0 {
			continue
		}
		k := r.Index.Key(slot)
		put(b, r.path("", f.space.Class(0), &k, 0), make([]byte, pieceBytes))
	}
	for b.Loop() {
		b.StopTimer()
		must(b, f.store.Close())
		b.StartTimer()
		f.start()
		l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: []kv.Key{hashKey(0, 32)}})
		if err != nil || l.Hits() != 1 {
			b.Fatal(l.Hits(), err)
		}
		l.Release()
	}
	if st := f.store.Stats().Roots[0]; st.Entries != entries || st.Scanned != 0 {
		b.Fatalf("a start found %d entries and scanned %d, want %d from the checkpoint", st.Entries, st.Scanned, entries)
	}
}

// fileless is a file system without files, on which every unlink succeeds: what is left is the index's own work.
type fileless struct{ staging.FS }

func (fileless) OpenFile(string, int, fs.FileMode) (staging.File, error) { return nil, fs.ErrNotExist }
func (fileless) Remove(string) error                                     { return nil }

// benchReserve is a put in a full root, up to its end: admit, place, victim, insert, without files. The keys from n on
// are new.
func (f *fixture) benchReserve(b *testing.B, n uint64) {
	r := f.root()
	r.FS = fileless{r.FS}
	f.unlinkVictims()
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		k := hashKey(n, 32)
		n++
		p, err := f.store.Put(ctx, PutRequest{Namespace: f.space, Key: k, Parent: hashKey(n-2, 32), Depth: 1})
		must(b, err)
		// Resident without a file: what publication does to the index.
		r.Lock()
		r.Index.SetPieces(p.mark.Slot, 1)
		r.Unlock()
		p.end()
	}
}

// BenchmarkOpen opens a piece and closes it, and puts a piece that replaces another: under the built-in name, and one that
// a policy in wasm has given.
func BenchmarkOpen(b *testing.B) {
	for _, by := range []string{"built-in", "policy"} {
		named := func(c *Config) {
			if by == "policy" {
				c.Policies.Place = use(b, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"})
			}
		}
		b.Run("open/"+by, func(b *testing.B) {
			const keys = 64
			f := newFixtureIn(b, b.TempDir(), 2*keys, 1, named)
			f.mustPut(upTo(keys)...)
			leases := make([]*Lease, keys)
			for n := range leases {
				leases[n] = f.lookup(uint64(n))
				defer leases[n].Release()
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				p, err := leases[i%keys].Open(0, 0)
				must(b, err)
				p.Close()
			}
		})
		b.Run("put/"+by, func(b *testing.B) {
			f := newFixtureIn(b, b.TempDir(), 16, 1, named)
			b.ReportAllocs()
			for n := uint64(0); b.Loop(); n++ {
				must(b, f.putAs(f.request(n, n, 0)))
			}
		})
	}
}
