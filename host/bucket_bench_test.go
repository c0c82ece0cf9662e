package host_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/host/kv"
)

// outageRig is a host of memory, a disk and a bucket, under stores that go on to the bucket and loads from it.
type outageRig struct {
	b      *testing.B
	host   string // its socket
	stored atomic.Uint64
	loads  atomic.Uint64 // from the bucket
	failed atomic.Uint64 // likewise
}

var outageChunk = kv.Uniform(2, 8, 2, 16<<10) // 512 KiB

func (r *outageRig) dial() *hosttest.Client {
	return hosttest.Dial(r.b, hosttest.Hello(r.host, outageChunk), 2, 0, 0)
}

func (r *outageRig) key(n uint64) (k kv.Key) {
	binary.BigEndian.PutUint64(k[:], n+1)
	return k
}

// load loads a chunk, and tells the level that had it: -1 where none had.
func (r *outageRig) load(c *hosttest.Client, n uint64) (level int, took time.Duration, ok bool) {
	l := c.Find(r.key(n))
	defer l.Release(r.b.Context())
	if l.Hits() == 0 {
		return -1, 0, false
	}
	began := time.Now()
	got := c.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: []uint32{0, 1}})
	return l.Levels()[0].Level, time.Since(began), len(got.Failed) == 0
}

// store stores the next chunk, as one of a prefix of 16: what is inside a prefix is demoted.
func (r *outageRig) store(c *hosttest.Client) {
	n := r.stored.Load()
	chunk := client.StoreChunk{Key: r.key(n), Blocks: []uint32{0, 1}}
	if n%16 > 0 {
		chunk.Parent = r.key(n - 1)
	}
	c.Put(chunk)
	r.stored.Add(1)
}

// far loads chunks that have left the disk until the context is done.
func (r *outageRig) far(ctx context.Context, c *hosttest.Client) {
	for ctx.Err() == nil {
		level, _, ok := r.load(c, rand.Uint64N(r.stored.Load()-200))
		switch {
		case level < 2: // the bucket has but the last 500, and none of those of an outage
			time.Sleep(500 * time.Microsecond)
			continue
		case ok:
			r.loads.Add(1)
		default:
			r.failed.Add(1)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// BenchmarkBucketOutages loads from memory and from a disk while the bucket behind them answers, and while it does not, and measures
// how long it is away after the server is back. With -benchtime 60s each outage lasts a minute.
func BenchmarkBucketOutages(b *testing.B) {
	s := s3double.Start(b)
	p := s3double.StartProxy(b, s.URL)
	c := bucketConfiguration(b, fmt.Sprintf("[[root]]\npath = \"memory:\"\ncapacity = \"32MiB\"\n[[root]]\nlevel = 1\npath = %q\ncapacity = \"64MiB\"\n"+
		"[[root]]\nlevel = 2\npath = \"s3://bucket\"\ncapacity = \"256MiB\"\nendpoint = %q\npath_style = true\n", filepath.Join(b.TempDir(), "disk"), p.URL))
	h, _ := hosttest.Start(b, c)
	r := &outageRig{b: b, host: h.Socket()}
	storer, near := r.dial(), r.dial()
	for range 450 {
		r.store(storer)
	}
	ctx, stop := context.WithCancel(b.Context())
	var others sync.WaitGroup
	for range 2 {
		others.Go(func() { r.far(ctx, r.dial()) })
	}
	others.Go(func() {
		for ctx.Err() == nil {
			r.store(storer)
			time.Sleep(20 * time.Millisecond)
		}
	})
	defer others.Wait()
	defer stop()
	for i, fault := range []s3double.Fault{"", s3double.Reset, "", s3double.Stall, "", s3double.TooMany, ""} {
		b.Run(fmt.Sprintf("%d/%s", i, fault), func(b *testing.B) {
			if fault != "" {
				p.Set(s3double.Rule{Fault: fault})
			}
			loads, failed, stored := r.loads.Load(), r.failed.Load(), r.stored.Load()
			var took [2][]time.Duration
			lost := 0
			for b.Loop() {
				level, d, ok := r.load(near, r.stored.Load()-1-rand.Uint64N(150))
				if level >= 0 && level < 2 {
					took[level] = append(took[level], d)
					if !ok {
						lost++
					}
				}
				time.Sleep(2 * time.Millisecond)
			}
			for level, name := range []string{"memory", "disk"} {
				list := took[level]
				slices.Sort(list)
				if len(list) > 0 {
					b.ReportMetric(float64(len(list)), name+"-loads")
					b.ReportMetric(list[len(list)/2].Seconds()*1000, name+"-p50-ms")
					b.ReportMetric(list[len(list)*99/100].Seconds()*1000, name+"-p99-ms")
				}
			}
			b.ReportMetric(float64(lost), "near-failed")
			b.ReportMetric(float64(r.loads.Load()-loads), "bucket-loads")
			b.ReportMetric(float64(r.failed.Load()-failed), "bucket-failed")
			b.ReportMetric(float64(r.stored.Load()-stored), "stores")
			if p.Set(); fault == "" {
				return
			}
			back := time.Now()
			for before := r.loads.Load(); r.loads.Load() == before && time.Since(back) < time.Minute; {
				time.Sleep(time.Millisecond)
			}
			b.ReportMetric(time.Since(back).Seconds(), "back-s")
		})
	}
}
