package host_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
	"github.com/kvhost/kvhost/host/kv"
)

var allHostile = flag.Bool("hostile.all", false, "swap in every hostile module, not a part of each class")

// each is how many modules of a class the short run leaves out between two.
var each = map[string]int{"bombs": 9, "runaways": 17, "memory": 3, "buffers": 9, "answers": 7, "places": 3}

// What a client of a host with hostile policies may have to bear, beside a client of the same host before.
const (
	hotKeys      = 60
	longestStall = 2 * time.Second // of a lookup, and ten times the control's: machines are busy
	leastHits    = 0.7             // of the control's share
	moreMemory   = 512 << 20
)

// worker is a client that stores, looks up and loads, and measures. Hot keys come again each round; others push from
// behind.
type worker struct {
	*testing.T
	s                  *hosttest.Client
	cold               uint32
	lookups, hits      int
	loads, failed      int
	stores, refused    int
	longest            time.Duration
	slowest, underTest string
	peak               int64
}

func workKey(n uint32) (k kv.Key) {
	binary.LittleEndian.PutUint32(k[:], n*2654435761)
	binary.LittleEndian.PutUint32(k[4:], n)
	k[31] = 1
	return k
}

// pages are the four pages of a chunk, in blocks 0 and 1 for a store and 2 and 3 for a load.
func (w *worker) pages(first int, visit func(page []byte, tag string)) {
	for plane := range 2 {
		for block := range 2 {
			visit(w.s.Page(plane, first+block), fmt.Sprint(plane, block))
		}
	}
}

func fill(page []byte, n uint32, tag string) {
	clear(page)
	copy(page, fmt.Sprintf("key %d page %s|", n, tag))
}

func (w *worker) store(ctx context.Context, n uint32) {
	w.stores++
	w.pages(0, func(page []byte, tag string) { fill(page, n, tag) })
	job, err := w.s.Store(ctx, n, 0, []client.StoreChunk{{Key: workKey(n), Blocks: []uint32{0, 1}}})
	if err != nil {
		w.Fatalf("%s: store: %v", w.underTest, err)
	}
	if r, err := job.Published(ctx); err != nil || r.Bytes == 0 {
		w.refused++
	}
}

// get looks a key up and loads it, and reports whether it was a hit that came back whole.
func (w *worker) get(ctx context.Context, n uint32) bool {
	start := time.Now()
	l, err := w.s.Lookup(ctx, client.LookupRequest{Request: n, Keys: []kv.Key{workKey(n)}})
	if err != nil {
		w.Fatalf("%s: lookup: %v", w.underTest, err)
	}
	if took := time.Since(start); took > w.longest {
		w.longest, w.slowest = took, w.underTest
	}
	if w.lookups++; l.Hits() != 1 {
		return false
	}
	w.loads++
	w.pages(2, func(page []byte, _ string) { clear(page) })
	job, err := w.s.Load(ctx, l, []client.LoadChunk{{Index: 0, Blocks: []uint32{2, 3}}}, client.LoadOptions{})
	if err != nil {
		w.Fatalf("%s: load: %v", w.underTest, err)
	}
	if r, err := job.Wait(ctx); err != nil || len(r.Failed) > 0 {
		w.failed++
		return false
	}
	w.hits++
	w.pages(2, func(page []byte, tag string) {
		want := make([]byte, 64)
		fill(want, n, tag)
		if !bytes.Equal(page[:64], want) {
			w.Errorf("%s: key %d came back as %q", w.underTest, n, page[:32])
		}
	})
	return true
}

// round uses every hot key once and stores some others.
func (w *worker) round(ctx context.Context) {
	for n := range uint32(hotKeys) {
		if !w.get(ctx, n) {
			w.store(ctx, n)
		}
		if n%8 == 0 {
			w.cold++
			w.store(ctx, 1<<20+w.cold)
		}
	}
	w.peak = max(w.peak, resident(w.T))
}

// resident is the memory that this process has now.
func resident(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	testenv.OK(t, err)
	var size, pages int64
	if _, err := fmt.Sscan(string(b), &size, &pages); err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

// share forgets what was measured, and returns the share of lookups that were hits.
func (w *worker) share() float64 {
	share := float64(w.hits) / float64(max(1, w.lookups))
	w.lookups, w.hits = 0, 0
	return share
}

// classFigures are what a client saw with the modules of one class: how many of its lookups hit, the longest of them, and
// the most memory.
type classFigures struct {
	modules, swapped, lookups, hits int
	longest                         time.Duration
	peak                            int64
}

// begin notes where the client is; the function that it returns adds what it saw since, and tells the longest lookup of it.
func (f *classFigures) begin(w *worker) (end func() time.Duration) {
	lookups, hits, longest, slowest, peak := w.lookups, w.hits, w.longest, w.slowest, w.peak
	w.longest, w.peak = 0, 0
	return func() time.Duration {
		here := w.longest
		f.lookups, f.hits = f.lookups+w.lookups-lookups, f.hits+w.hits-hits
		f.longest, f.peak = max(f.longest, w.longest), max(f.peak, w.peak)
		if w.peak = max(w.peak, peak); longest > w.longest {
			w.longest, w.slowest = longest, slowest
		}
		return here
	}
}

// logged counts the lines of a host's log.
type logged struct{ lines atomic.Int64 }

func (l *logged) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }
func (l *logged) WithAttrs([]slog.Attr) slog.Handler               { return l }
func (l *logged) WithGroup(string) slog.Handler                    { return l }
func (l *logged) Handle(context.Context, slog.Record) error        { l.lines.Add(1); return nil }

// Hostile policies are swapped into a served host, one after the other, while a client works. It must not see wrong
// bytes or long stalls, and it must go on hitting; the host's memory and its log stay bounded, and refusals are fit for people.
func TestHostilePolicies(t *testing.T) {
	testenv.Slow(t)
	c := configuration(t)
	c.Roots[0].Capacity = 150 * 10 * 4096
	c.PolicyMemory = 256 << 20
	c.PolicyDir = policytest.Dir(t, "lru", "fanout", "layermajor")
	c.PolicyCache = filepath.Join(t.TempDir(), "cache")
	log := &logged{}
	h, stop := hosttest.StartWith(t, host.Config{Config: c, Log: slog.New(log), Version: "test"})
	defer stop()
	w := &worker{T: t, s: dial(t, h)}
	ctx := testenv.Context(t)
	for range 2 {
		w.round(ctx)
	}
	w.share()
	for range 10 {
		w.round(ctx)
	}
	control, before, stall := w.share(), w.peak, w.longest
	t.Logf("control: %.1f %% hits, longest lookup %v, %d MiB", 100*control, stall, before>>20)
	w.longest = 0

	path := filepath.Join(t.TempDir(), "hostile.wasm")
	labels := [abi.Roles]string{abi.RoleEvict: "lru", abi.RoleAdmit: "admit-default", abi.RolePlace: "fanout", abi.RoleLayout: "layermajor"}
	counts, swapped, refused := map[string]int{}, 0, 0
	classes := map[string]*classFigures{}
	tally := testenv.NewTally(t, "hostile")
	began, lines := time.Now(), log.lines.Load()
	// meets has the client work while a module is swapped in, and says how long a lookup took.
	meets := func(m *wasmtest.Module) time.Duration {
		w.underTest = m.String()
		figures := classes[m.Class].begin(w)
		testenv.OK(t, os.WriteFile(path, m.Wasm, 0o600))
		_, err := h.Policies().Swap(ctx, labels[m.Role], config.Policy{Module: path})
		tally.Add(1, 0, 0)
		if err == nil {
			swapped++
			classes[m.Class].swapped++
		} else if refused++; !errors.Is(err, policyset.ErrPolicy) && !strings.Contains(err.Error(), "policy") {
			t.Errorf("%s: swap: %v", m, err)
		}
		odd := func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' }
		if text := fmt.Sprint(err); len(text) > 8192 || strings.ContainsFunc(text, odd) {
			t.Errorf("%s: its refusal has %d bytes that people read, want printable ones: %.300q", m, len(text), text)
		}
		w.round(ctx)
		if err != nil {
			return figures()
		}
		for range 6 {
			w.round(ctx)
		}
		good := labels[m.Role]
		if m.Role == abi.RoleAdmit { // the built-in one is no module
			good = path
			testenv.OK(t, os.WriteFile(path, wasmtest.Harmless(m.Role), 0o600))
		}
		if _, err := h.Policies().Swap(ctx, labels[m.Role], config.Policy{Module: good}); err != nil {
			t.Errorf("%s: it cannot be replaced: %v", m, err)
		}
		w.round(ctx)
		return figures()
	}
	for _, m := range wasmtest.Modules() {
		n := counts[m.Class]
		counts[m.Class]++
		if !*allHostile && n%each[m.Class] != 0 {
			continue
		}
		if classes[m.Class] == nil {
			classes[m.Class] = &classFigures{}
		}
		classes[m.Class].modules++
		took := meets(&m)
		for tries := 1; took > longestStall+10*stall && tries < 3; tries++ { // what other work of the machine did does not come again
			took = min(took, meets(&m))
		}
		if took > longestStall+10*stall {
			t.Errorf("a lookup took %v with %s, each time, %v before", took, &m, stall)
		}
	}
	for _, class := range wasmtest.Classes {
		if f := classes[class]; f != nil {
			t.Logf("| %s | %d | %d | %.1f ms | %d MiB | %.2f |", class, f.modules, f.swapped, f.longest.Seconds()*1000, f.peak>>20,
				float64(f.hits)/float64(max(1, f.lookups))/control)
		}
	}
	took := time.Since(began)
	w.underTest = "afterwards"
	got := w.share()
	t.Logf("%d modules swapped in, %d refused, in %v: %.1f %% hits, longest lookup %v (%s), %d of %d loads failed, %d of %d stores "+
		"refused, %d MiB, %d lines of log", swapped, refused, took.Round(time.Millisecond), 100*got, w.longest, w.slowest, w.failed,
		w.loads, w.refused, w.stores, w.peak>>20, log.lines.Load()-lines)
	if got < leastHits*control {
		t.Errorf("%.1f %% hits, %.1f %% before", 100*got, 100*control)
	}
	if w.peak > before+moreMemory {
		t.Errorf("%d MiB, %d before", w.peak>>20, before>>20)
	}
	if rate := float64(log.lines.Load()-lines) / max(1, took.Seconds()); rate > 100 {
		t.Errorf("%.0f lines of log a second", rate)
	}
}
