package store

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sys/unix"
)

// BenchmarkSaveTouches keeps the order of last touch of KVHOST_ENTRIES entries, beside a client that looks up one chunk
// after the other: the longest that one takes, and, for as long, without that.
func BenchmarkSaveTouches(b *testing.B) {
	entries := sized(b, "KVHOST_ENTRIES", 1<<18)
	f := indexOnly(b, entries, 32)
	f.fill(entries, 32)
	r := f.root()
	longest := func(during func()) (most time.Duration) {
		over := make(chan struct{})
		go func() {
			during()
			close(over)
		}()
		for n := uint64(0); ; n = (n + 997) % uint64(entries) {
			k := hashKey(n, 32)
			start := time.Now()
			l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: []kv.Key{k}})
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
		with = max(with, longest(r.recovery.saveTouches))
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
	for _, how := range []string{"scan", "checkpoint"} {
		b.Run(fmt.Sprintf("files=%d/%s", files, how), func(b *testing.B) {
			if how == "checkpoint" { // of what a scan has found
				must(b, f.store.Close())
				_ = os.Remove(file)
				f.start()
			}
			var cpu time.Duration
			for b.Loop() {
				b.StopTimer()
				must(b, f.store.Close())
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
