package store

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

var liarsTime = flag.Duration("liars.time", 0, "how long TestLyingStore goes on with random seeds")

// naming is a log that counts the lines which say that something is wrong with the bucket, and looks for what a terminal would obey.
type naming struct {
	slog.Handler
	named atomic.Int64
}

func (n *naming) Enabled(context.Context, slog.Level) bool { return true }
func (n *naming) WithAttrs([]slog.Attr) slog.Handler       { return n }
func (n *naming) WithGroup(string) slog.Handler            { return n }
func (n *naming) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool { text += fmt.Sprint(" ", a.Key, "=", a.Value); return true })
	if r.Level >= slog.LevelWarn && (strings.Contains(text, "bucket") || strings.Contains(text, "s3:")) {
		n.named.Add(1)
	}
	return nil
}

// TestLyingStore: an object store that lies by its seed, as the last level, costs the levels before it no hits, is named within ten failures,
// takes no memory, and has no other bytes read than were stored.
func TestLyingStore(t *testing.T) {
	testenv.Slow(t)
	const near, mid, far, all, steps = 4, 16, 64, 70, 250
	const memory = 32 << 20
	history := func(t *testing.T, seed uint64, lies bool) (hits int) {
		s := startServer(t)
		liar := s3double.StartLiar(t, s, seed)
		log := &naming{}
		f := newFixtureIn(t, filepath.Join(t.TempDir(), "near"), near, 1, func(c *Config) {
			c.Roots[0].Volatile, c.Log = true, slog.New(log)
			c.Roots = append(c.Roots,
				RootConfig{Path: filepath.Join(t.TempDir(), "mid"), Capacity: mid * pieceBytes, MaxEntries: 1024, Level: 1},
				RootConfig{Capacity: far * pieceBytes, MaxEntries: 1024, Level: 2})
			c.Moves.Shutdown = 100 * time.Millisecond
			inBucket(t, liar.URL)(c)
		})
		random := rand.New(rand.NewPCG(seed, 38))
		for n := range uint64(all) {
			f.mustPut(n)
			f.settle()
		}
		if n := len(pieces(s)); n < far/2 {
			t.Fatalf("%d objects before it lies, want at least %d", n, far/2)
		}
		liar.Lie(lies)
		heap := func() int64 {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return int64(m.HeapAlloc)
		}
		runtime.GC()
		before, failed, slowest := heap(), 0, time.Duration(0)
		for range steps {
			n := random.Uint64N(all)
			if random.IntN(2) == 0 {
				_ = f.put(n, 0)
				continue
			}
			since := time.Now()
			l := f.lookup(n)
			slowest = max(slowest, time.Since(since))
			if l.Hits() > 0 {
				data, err := read(l, 0, 0)
				switch {
				case err == nil && !bytes.Equal(data[:f.space.Plan(0).PayloadBytes()], payload(f.space.Plan(0), testKey(n), 0)[:f.space.Plan(0).PayloadBytes()]):
					t.Fatalf("key %d: other bytes than were stored", n)
				case l.Root(0) != bucketRoot && err == nil:
					hits++
				case err != nil:
					failed++
				}
			}
			l.Release()
			if named := log.named.Load() > 0 || f.store.Stats().Roots[2].State != health.In; failed >= 10 && !named {
				t.Fatalf("%d failures, and no line names the bucket", failed)
			}
			if more := heap() - before; more > memory {
				t.Fatalf("%d bytes of memory more", more)
			}
			for i, r := range f.store.Stats().Roots {
				if r.Used > r.Capacity {
					t.Fatalf("root %d has %d bytes of %d", i, r.Used, r.Capacity)
				}
			}
		}
		if lies {
			t.Logf("seed %d: %d lies, %d loads failed, %d lines name the bucket, the longest lookup took %s, %d hits near", seed, liar.Lies(), failed,
				log.named.Load(), slowest, hits)
		}
		liar.Lie(false)
		return hits
	}
	with, without := 0, 0
	tally := testenv.NewTally(t, "lying-store")
	run := func(seed uint64) bool {
		return t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			without += history(t, seed, false)
			with += history(t, seed, true)
			tally.Add(2*steps, 0, 1)
		})
	}
	for seed := range uint64(2) {
		run(seed)
	}
	testenv.FreshSeeds(*liarsTime, run)
	t.Logf("%d hits near with the liar, %d without it", with, without)
	if with*4 < without*3 { // copies between the levels take their time, and on a busy machine more of it
		t.Errorf("%d hits near with the liar, %d without it, want at least three quarters", with, without)
	}
}
