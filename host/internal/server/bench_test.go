package server

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/client"
)

// BenchmarkPing is the round trip of the smallest message.
func BenchmarkPing(b *testing.B) {
	p := newRig(b, nil).dial(nil)
	b.ReportAllocs()
	for b.Loop() {
		if err := p.Ping(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLookup asks for 1,000 keys: of which none is there, and all.
func BenchmarkLookup(b *testing.B) {
	const n = 1000
	for _, c := range []struct {
		name string
		hits int
	}{{"miss", 0}, {"hit", n}} {
		b.Run(c.name, func(b *testing.B) {
			p := newRig(b, nil).dial(nil)
			for at := 0; at < c.hits; at += arenaBlocks / chunkBlocks {
				var list []client.StoreChunk
				for k := at; k < min(c.hits, at+arenaBlocks/chunkBlocks); k++ {
					list = append(list, chunkOf(k, k-at))
				}
				if _, err := p.store(list); err != nil {
					b.Fatal(err)
				}
			}
			q := client.LookupRequest{Keys: keys(n)}
			b.ReportAllocs()
			for b.Loop() {
				l, err := p.Lookup(b.Context(), q)
				if err != nil || l.Hits() != c.hits {
					b.Fatal(l.Hits(), err)
				}
				if c.hits > 0 {
					b.StopTimer()
					if err := l.Release(b.Context()); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
			}
		})
	}
}

// BenchmarkBesideAFlood is how long 63 sessions wait for the lookups of a hundred keys: by themselves, and beside a session
// that sends as many stores as it may. The ratio is of the two in the same run.
func BenchmarkBesideAFlood(b *testing.B) {
	const quiet, rounds = 63, 40
	r := newRig(b, nil)
	var peers []*peer
	for i := range quiet {
		peers = append(peers, r.dial(func(h *client.Hello) { h.Engine = fmt.Sprint("quiet ", i) }))
	}
	peers[0].save(0, 16)
	flood := r.dial(func(h *client.Hello) { h.Engine = "flood" })
	measure := func() (all []time.Duration) {
		took := make([][rounds]time.Duration, quiet)
		var work sync.WaitGroup
		for i, p := range peers {
			work.Go(func() {
				for n := range rounds {
					began := time.Now()
					l, err := p.Lookup(b.Context(), client.LookupRequest{Keys: keys(100)})
					if err != nil || l.Hits() != 16 {
						b.Error(l.Hits(), err)
						return
					}
					took[i][n] = time.Since(began)
					_ = l.Release(b.Context())
				}
			})
		}
		work.Wait()
		for i := range took {
			all = append(all, took[i][:]...)
		}
		return all
	}
	var alone, beside []time.Duration
	for n := 0; b.Loop(); n++ {
		alone = append(alone, measure()...)
		ctx, stop := context.WithCancel(b.Context())
		var flooding sync.WaitGroup
		flooding.Go(func() {
			for at := 1000; ctx.Err() == nil; at += 500 {
				var list []client.StoreChunk
				for k := at; k < at+500; k++ {
					list = append(list, client.StoreChunk{Key: key(k), Blocks: blocks(k % 32)})
				}
				if job, err := flood.Store(ctx, 0, 0, list); err == nil && at%5000 == 0 {
					_, _ = job.Published(ctx) // what is refused is answered at once
				}
			}
		})
		beside = append(beside, measure()...)
		stop()
		flooding.Wait()
		if err := flood.AwaitCopies(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	p99 := func(list []time.Duration) float64 {
		slices.Sort(list)
		return list[len(list)*99/100].Seconds() * 1e6
	}
	b.ReportMetric(p99(alone), "p99-alone-µs")
	b.ReportMetric(p99(beside), "p99-flood-µs")
	b.ReportMetric(p99(beside)/p99(alone), "ratio")
}
