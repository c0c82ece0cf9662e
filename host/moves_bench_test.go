package host_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

// BenchmarkLoadsBesideCopies loads chunks of 2 MiB from a root in memory, or on a disk, through a session, while another
// session stores new ones: in a host without a second level, and in one that copies all that is stored to a disk, at the
// default budget. The two take turns. The ratio is of the 99th percentiles. The roots hold 2,000 chunks, which no run of
// some seconds fills.
func BenchmarkLoadsBesideCopies(b *testing.B) {
	b.Run("memory", func(b *testing.B) { loadsBesideCopies(b, "memory:", "memory:") })
	b.Run("disk", func(b *testing.B) { loadsBesideCopies(b, b.TempDir(), b.TempDir()) })
}

func loadsBesideCopies(b *testing.B, aloneAt, copiedAt string) {
	const turn = 50
	alone := newCopyRig(b, config.Root{Path: aloneAt, Capacity: 4 << 30})
	copies := newCopyRig(b, config.Root{Path: copiedAt, Capacity: 4 << 30, Through: true},
		config.Root{Path: b.TempDir(), Capacity: 4 << 30, Level: 1})
	sides := []*copyRig{alone, copies}
	for i := 0; b.Loop(); i++ {
		r := sides[i/turn%2]
		if i%turn == 0 {
			sides[(i/turn+1)%2].pause()
			r.resume(b)
		}
		r.load(b, i%hotChunks)
	}
	for _, r := range sides {
		r.pause()
		slices.Sort(r.took)
	}
	at := func(r *copyRig, percent int) float64 {
		return float64(r.took[len(r.took)*percent/100].Nanoseconds()) / 1e3
	}
	if len(alone.took) == 0 || len(copies.took) == 0 {
		return
	}
	b.ReportMetric(at(alone, 50), "p50-alone-us")
	b.ReportMetric(at(copies, 50), "p50-copies-us")
	b.ReportMetric(at(alone, 99), "p99-alone-us")
	b.ReportMetric(at(copies, 99), "p99-copies-us")
	b.ReportMetric(at(copies, 99)/at(alone, 99), "ratio")
}

// hotChunks are loaded again and again; the sessions store them first.
const hotChunks = 8

// copyRig is a host with a session that loads and one that stores when it is let.
type copyRig struct {
	reader, writer *client.Session
	took           []time.Duration
	next           uint64
	stop           func()
}

func newCopyRig(b *testing.B, roots ...config.Root) *copyRig {
	c := hosttest.Configuration(b, roots...)
	if err := c.Validate(); err != nil {
		b.Fatal(err)
	}
	h, _ := hosttest.Start(b, c)
	r := &copyRig{reader: openPages(b, h, "reader"), writer: openPages(b, h, "writer"), stop: func() {}}
	for i := range hotChunks {
		r.store(b, r.reader, uint64(i))
	}
	r.next = 1000
	return r
}

// openPages opens a session with a block of 32 pages of 64 KiB.
func openPages(b *testing.B, h *host.Host, engine string) *client.Session {
	s, err := client.Dial(b.Context(), client.Hello{
		Socket: h.Socket(), Engine: engine, Role: "worker", LocalRanks: 1,
		Namespace: kv.Namespace{Model: "m", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16,
			Groups: []kv.Group{{Geometry: kv.Uniform(1, 32, 1, 64<<10)}}},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() })
	arena, err := s.NewArena(2 << 20)
	if err != nil {
		b.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for at := 0; at < 2<<20; at += 8 {
		binary.LittleEndian.PutUint64(arena.Bytes()[at:], rng.Uint64())
	}
	var planes []client.PlaneRegion
	for p := range int64(32) {
		planes = append(planes, client.PlaneRegion{Offset: p * 64 << 10, Stride: 64 << 10, Blocks: 1})
	}
	if _, err := s.Register(b.Context(), 0, arena, planes); err != nil {
		b.Fatal(err)
	}
	return s
}

func copyKey(n uint64) (k kv.Key) {
	binary.LittleEndian.PutUint64(k[:], n+1)
	return k
}

func (r *copyRig) store(b *testing.B, s *client.Session, n uint64) {
	job, err := s.Store(b.Context(), 0, 0, []client.StoreChunk{{Key: copyKey(n), Blocks: []uint32{0}}})
	if err == nil {
		_, err = job.Published(b.Context())
	}
	if err != nil && b.Context().Err() == nil {
		b.Error(fmt.Errorf("storing chunk %d: %w", n, err))
	}
}

// resume lets the writer store 256 chunks a second, which is the default budget of copies.
func (r *copyRig) resume(b *testing.B) {
	ctx, cancel := context.WithCancel(b.Context())
	var work sync.WaitGroup
	work.Go(func() {
		for tick := time.NewTicker(time.Second / 256); ; r.next++ {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
				r.store(b, r.writer, r.next)
			}
		}
	})
	r.stop = func() {
		cancel()
		work.Wait()
		r.stop = func() {}
	}
}

func (r *copyRig) pause() { r.stop() }

func (r *copyRig) load(b *testing.B, n int) {
	began := time.Now()
	l, err := r.reader.Lookup(b.Context(), client.LookupRequest{Request: 1, Keys: []kv.Key{copyKey(uint64(n))}})
	if err != nil || l.Hits() != 1 {
		b.Fatalf("chunk %d: %v", n, err)
	}
	job, err := r.reader.Load(b.Context(), l, []client.LoadChunk{{Blocks: []uint32{0}}}, client.LoadOptions{})
	if err == nil {
		_, err = job.Wait(b.Context())
	}
	if err != nil {
		b.Fatal(err)
	}
	r.took = append(r.took, time.Since(began))
	if err := l.Release(b.Context()); err != nil {
		b.Fatal(err)
	}
}
