package store

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/recovery"
	"github.com/kvhost/kvhost/staging"
	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

// hashKey is a key as cheap to make as there is, of 16 or 32 bytes.
func hashKey(n uint64, bytes int) (k chunk.Key) {
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
		Roots: []RootConfig{{Path: b.TempDir(), Capacity: int64(entries) * pieceBytes, MaxEntries: uint32(entries + 8)}},
		Log:   slog.New(slog.DiscardHandler),
	}
	for _, c := range change {
		c(&f.cfg)
	}
	f.start()
	return f
}

// fill adds chains of 1,000 chunks.
func (f *fixture) fill(entries, keyBytes int) {
	r, c := f.store.roots[0], f.space.Class(0)
	r.Lock()
	defer r.Unlock()
	f.store.catalog.Tenants.Number(0)
	var parent uint64
	for n := range uint64(entries) {
		if n%1000 == 0 {
			parent = 0
		}
		k := hashKey(n, keyBytes)
		fp := chunk.Fingerprint(c.Namespace.Digest, c.Group, k)
		slot := r.Index.Add(fp, index.Owner{Class: c.ID}, &k, parent, uint32(n%1000))
		c.Ref()
		r.Index.SetUnits(slot, pieceBytes/pieceformat.Page)
		r.Index.At(slot).Set(index.Complete)
		r.Index.SetPieces(slot, 1)
		r.Account.Commit(0, r.Index.Bytes(slot))
		r.Index.Touch(slot)
		r.Evictor.Announce(abi.OpInsert, slot, fp, 0)
		parent = fp
	}
}

// sized reads a size from the environment: benchmarks are short unless told otherwise.
func sized(b *testing.B, name string, short int) int {
	v := os.Getenv(name)
	if v == "" {
		return short
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		b.Fatal(err)
	}
	return n
}

// deaf is a policy that does nothing with what it is told: what is left of a lookup is the index's own.
type deaf struct{}

func (deaf) Events([]abi.Event)            {}
func (deaf) Victims(abi.Ask, []uint32) int { return 0 }

// BenchmarkLookup1000 grants leases on prefixes of 1,000 chunks among KVHOST_ENTRIES entries, with the built-in policy,
// and with one that takes no time. A request asks twice, as an engine does whose first answer came before it had room.
func BenchmarkLookup1000(b *testing.B) {
	entries := sized(b, "KVHOST_ENTRIES", 1<<20)
	for _, name := range []string{"no-policy", "lru"} {
		f := indexOnly(b, entries, 32, func(c *Config) {
			if name != "lru" {
				c.Policies.Evict = handle(policy.NativeModule(name, []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) {
					return deaf{}, nil
				}))
			}
		})
		f.fill(entries, 32)
		b.Run(fmt.Sprintf("entries=%d/%s", entries, name), func(b *testing.B) { f.benchLookups(b, entries, 0) })
		b.Run(fmt.Sprintf("entries=%d/%s/again", entries, name), func(b *testing.B) { f.benchLookups(b, entries, 1) })
		f.store.Close()
	}
}

func (f *fixture) benchLookups(b *testing.B, entries int, request uint32) {
	const chain = 1000
	lists := make([][]chunk.Key, min(64, entries/chain))
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

// BenchmarkCheckpoint writes and reads the index of KVHOST_ENTRIES entries.
func BenchmarkCheckpoint(b *testing.B) {
	entries := sized(b, "KVHOST_ENTRIES", 1<<18)
	f := indexOnly(b, entries, 32)
	f.fill(entries, 32)
	r := f.store.roots[0]
	b.Run(fmt.Sprintf("entries=%d/write", entries), func(b *testing.B) {
		for b.Loop() {
			if err := r.kept.SaveCheckpoint(r.Index, 1); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run(fmt.Sprintf("entries=%d/read", entries), func(b *testing.B) {
		file, err := r.FS.OpenFile(r.Path+"/"+pieceformat.CheckpointFile, os.O_RDONLY, 0)
		if err != nil {
			b.Fatal(err)
		}
		defer file.Close()
		info, err := file.Stat()
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			x := index.New(r.cfg.MaxEntries, f.store.catalog.Fingerprint, f.store.catalog.Base)
			owner := func(o *pieceformat.CheckpointOwner) (index.Owner, error) {
				cl, err := f.store.catalog.ClassFor(&pieceformat.Header{Namespace: o.Namespace, Group: o.Group})
				return index.Owner{Class: cl.ID}, err
			}
			if _, err := recovery.ReadCheckpoint(file, info.Size, x, owner); err != nil || x.Len() != r.Index.Len() {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(info.Size)/float64(entries), "file-B/entry")
	})
}

// BenchmarkSaveTouches keeps the order of last touch of KVHOST_ENTRIES entries, beside a client that looks up one chunk
// after the other: the longest that one takes, and, for as long, without that.
func BenchmarkSaveTouches(b *testing.B) {
	entries := sized(b, "KVHOST_ENTRIES", 1<<18)
	f := indexOnly(b, entries, 32)
	f.fill(entries, 32)
	r := f.store.roots[0]
	longest := func(during func()) (most time.Duration) {
		over := make(chan struct{})
		go func() {
			during()
			close(over)
		}()
		for n := uint64(0); ; n = (n + 997) % uint64(entries) {
			k := hashKey(n, 32)
			start := time.Now()
			l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: []chunk.Key{k}})
			if err != nil || l.Hits() != 1 {
				b.Error(n, err)
				return most
			}
			l.Release()
			most = max(most, time.Since(start))
			select {
			case <-over:
				return most
			default:
			}
		}
	}
	var with, without time.Duration
	for b.Loop() {
		start := time.Now()
		with = max(with, longest(r.recovery.SaveTouches))
		took := time.Since(start)
		b.StopTimer()
		without = max(without, longest(func() { time.Sleep(took) }))
		b.StartTimer()
	}
	b.ReportMetric(float64(with.Microseconds()), "longest-us")
	b.ReportMetric(float64(without.Microseconds()), "quiet-longest-us")
}

// BenchmarkRestart opens a root of KVHOST_FILES sparse pieces by its checkpoint, and by a scan.
func BenchmarkRestart(b *testing.B) {
	files := sized(b, "KVHOST_FILES", 2000)
	f := newFixture(b, b.TempDir(), files+8, 1, func(c *Config) { c.ScanWait = time.Hour })
	f.mustPut(0)
	page, err := os.ReadFile(f.pieceFile(0, 0))
	if err != nil {
		b.Fatal(err)
	}
	h, err := pieceformat.DecodeHeader(page)
	if err != nil {
		b.Fatal(err)
	}
	for n := range uint64(files - 1) {
		h.Parent, h.Key, h.Depth, h.StoreTime = h.Key, testKey(n+1), uint32(n+1), h.StoreTime+1
		h.Encode(page)
		name := f.pieceFile(n+1, 0)
		put(b, name, page[:pieceformat.Page])
		if err := os.Truncate(name, h.FileBytes()); err != nil {
			b.Fatal(err)
		}
	}
	// else the first durable thing waits for all of them
	if err := f.store.roots[0].FS.SyncFS(f.cfg.Roots[0].Path); err != nil {
		b.Fatal(err)
	}
	file := filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)
	for _, how := range []string{"scan", "checkpoint"} {
		b.Run(fmt.Sprintf("files=%d/%s", files, how), func(b *testing.B) {
			var cpu time.Duration
			for b.Loop() {
				b.StopTimer()
				if err := f.store.Close(); err != nil {
					b.Fatal(err)
				}
				if how == "scan" {
					_ = os.Remove(file)
				}
				b.StartTimer()
				before := cpuTime()
				f.start()
				cpu += cpuTime() - before
			}
			b.ReportMetric(float64(cpu.Milliseconds())/float64(b.N), "cpu-ms/op")
			if st := f.store.Stats().Roots[0]; st.Entries != files || (st.Scanned == 0) != (how == "checkpoint") {
				b.Fatalf("%+v", st)
			}
		})
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

// fileless is a file system on which every unlink succeeds: what is left is the index's own work.
type fileless struct{ staging.FS }

func (fileless) Remove(string) error { return nil }

// BenchmarkReserve is a put in a full root, up to its end: admit, place, victim, insert, without files.
func BenchmarkReserve(b *testing.B) {
	const entries = 1 << 18
	f := indexOnly(b, entries, 32)
	f.fill(entries, 32)
	r := f.store.roots[0]
	r.FS = fileless{r.FS}
	f.unlinkVictims()
	ctx := context.Background()
	b.ReportAllocs()
	n := uint64(entries)
	for b.Loop() {
		k := hashKey(n, 32)
		n++
		p, err := f.store.Put(ctx, PutRequest{Namespace: f.space, Key: k, Parent: hashKey(n-2, 32), Depth: 1})
		if err != nil {
			b.Fatal(err)
		}
		// Resident without a file: what publication does to the index.
		r.Lock()
		r.Index.SetPieces(p.mark.Slot, 1)
		r.Unlock()
		p.end()
	}
}
