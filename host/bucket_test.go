package host_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/host/kv"
)

// bucketConfiguration is a configuration of TOML text, with the roots in it.
func bucketConfiguration(t testing.TB, roots string) *config.Config {
	t.Helper()
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	file := filepath.Join(t.TempDir(), "kvhost.toml")
	testenv.OK(t, os.WriteFile(file, []byte(roots), 0o600))
	l, err := config.Load(config.Source{File: file})
	testenv.OK(t, err)
	c := configuration(t)
	c.Roots = l.Config.Roots
	testenv.OK(t, c.Validate())
	return c
}

// TestBucketRoot: chunks of two ranks are stored into a bucket and loaded from it, whole and layer-wise, compressed and as they are,
// over a restart.
func TestBucketRoot(t *testing.T) {
	for _, compression := range []string{config.CompressionOff, config.CompressionHuffman} {
		t.Run(compression, func(t *testing.T) { bucketRoot(t, s3double.Start(t).URL, compression) })
	}
	t.Run("versitygw", func(t *testing.T) { bucketRoot(t, s3double.StartReal(t), config.CompressionOff) })
}

func bucketRoot(t *testing.T, url, compression string) {
	c := bucketConfiguration(t, fmt.Sprintf("[[root]]\npath = \"s3://bucket/a/b\"\ncapacity = \"1GiB\"\nendpoint = %q\npath_style = true\n", url))
	c.Store.Compression = compression
	random := rand.New(rand.NewPCG(3, 4))
	const chunks = 4
	for run := range 2 {
		h, two, stop := twoRanks(t, host.Config{Config: c})
		for n := range chunks {
			for _, r := range two {
				if run == 0 {
					r.store(n, random)
				}
			}
		}
		for n := range chunks {
			for rank, r := range two {
				if !r.load(n, n%2 == rank, random) {
					t.Errorf("%s, run %d: chunk %d is a miss", compression, run, n)
				}
			}
		}
		if want := `kvhost_bucket_requests_total{request="get",result="error",root="s3://bucket/a/b"} `; !strings.Contains(get(t, h, "/metrics"), want) {
			t.Errorf("/metrics lacks %s", want)
		}
		stop()
	}
}

// TestBucketBehindADirectory: a chunk of several parts is copied through into the bucket, and is loaded from there when the directory
// is empty.
func TestBucketBehindADirectory(t *testing.T) {
	s := s3double.Start(t)
	near := filepath.Join(t.TempDir(), "near")
	c := bucketConfiguration(t, fmt.Sprintf("[[root]]\npath = %q\ncapacity = \"1GiB\"\nwrite = \"through\"\n"+
		"[[root]]\nlevel = 1\npath = \"s3://bucket\"\ncapacity = \"1GiB\"\nendpoint = %q\npath_style = true\n", near, s.URL))
	g := kv.Uniform(2, 20, 2, 256<<10) // 20 MiB
	key := kv.Key{4, 5, 6}
	page := func(plane, block int) []byte { return bytes.Repeat([]byte{byte(plane), byte(block), 7, 11}, 64<<10) }
	for run := range 2 {
		h, stop := hosttest.Start(t, c)
		w := hosttest.Dial(t, hosttest.Hello(h.Socket(), g), 4, 0, 0)
		if run == 0 {
			for plane := range len(g.Planes) {
				for block := range 2 {
					copy(w.Page(plane, block), page(plane, block))
				}
			}
			if r := w.Put(client.StoreChunk{Key: key, Blocks: []uint32{0, 1}}); r.Chunks[0].Result != client.Stored {
				t.Fatalf("published %+v, want a stored chunk", r)
			}
			testenv.Until(t, "the chunk's copy in the bucket", func() bool { return s.Count("COMPLETE") > 0 })
		} else {
			w.Poison()
			l := w.Find(key)
			if l.Hits() != 1 {
				t.Fatalf("%d hits in the bucket, want 1", l.Hits())
			}
			if r := w.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: []uint32{3, 1}}); len(r.Failed) > 0 {
				t.Fatalf("load %+v, want no failed block", r)
			}
			for plane := range len(g.Planes) {
				for block, at := range []int{3, 1} {
					if !bytes.Equal(w.Page(plane, at), page(plane, block)) {
						t.Fatalf("plane %d, block %d: other bytes than were stored", plane, block)
					}
				}
			}
		}
		w.Close()
		stop()
		testenv.OK(t, os.RemoveAll(near))
		testenv.OK(t, os.Mkdir(near, 0o700))
	}
	if n, want := s.Count("PART"), 3; n != want {
		t.Errorf("%d parts were sent, want %d: one upload of 20 MiB", n, want)
	}
}

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

// A host with nothing but roots in memory stores and loads through the socket. After a restart they are empty.
func TestMemoryRoots(t *testing.T) {
	c := configuration(t)
	c.Roots = []config.Root{{Path: "memory:", Capacity: 64 << 20}, {Path: "memory:second", Capacity: 32 << 20}}
	testenv.OK(t, c.Validate())
	random := rand.New(rand.NewPCG(7, 8))
	const chunks = 4
	for run := range 2 {
		h, two, stop := twoRanks(t, host.Config{Config: c})
		for n := range chunks {
			for rank, r := range two {
				if rank == 0 && r.Find(compressionKey(n)).Hits() != 0 {
					t.Errorf("run %d: a new host has chunk %d, want none", run, n)
				}
				r.store(n, random)
			}
		}
		for n := range chunks {
			for rank, r := range two {
				if !r.load(n, n%2 == rank, random) {
					t.Errorf("run %d: chunk %d is gone", run, n)
				}
			}
		}
		metrics := get(t, h, "/metrics")
		for _, want := range []string{
			`kvhost_root_memory_bytes{root="memory:",state="pending"} 0`,
			`kvhost_root_memory_bytes{root="memory:second",state="used"}`, `,route="memory"}`,
		} {
			if !strings.Contains(metrics, want) {
				t.Errorf("/metrics lacks %s", want)
			}
		}
		if strings.Contains(metrics, `route="staged"} 1`) {
			t.Error("a piece was staged")
		}
		stop()
	}
}

// The memory of roots is page-locked for a GPU, and given back in the end.
func TestMemoryRootIsPageLocked(t *testing.T) {
	double := onDouble(t)
	defer double.Forget()
	c := configuration(t)
	c.Roots = []config.Root{{Path: "memory:", Capacity: 200 << 20}}
	var log bytes.Buffer
	h, err := host.New(context.Background(), host.Config{Config: c, Log: slog.New(slog.NewTextHandler(&log, nil))})
	testenv.OK(t, err)
	testenv.NoError(t, h.Close())
	locked, unlocked := double.Calls("cuMemHostRegister_v2"), double.Calls("cuMemHostUnregister")
	if locked < 3 || locked != unlocked { // commands, slots and the first step
		t.Errorf("memory registered %d times, unregistered %d times", locked, unlocked)
	}
	if text := log.String(); !strings.Contains(text, "route=memory") || double.Calls("cuFileDriverOpen") != 0 {
		t.Errorf("cuFile was opened, or the route not told: %s", text)
	}
}

// A host with memory before its root stores into the memory, copies to the root at once, loads from memory, and finds the
// chunks in the root after a restart. The memory is no part of the configuration that a reload is compared with.
func TestMemoryBeforeRoots(t *testing.T) {
	c := configuration(t)
	key := kv.Key{1, 2, 3}
	page := bytes.Repeat([]byte("kv"), 4096)
	for run, wantLevel := range []string{"0", "1"} {
		h, stop := hosttest.StartWith(t, host.Config{Config: c, Memory: 256 << 20})
		s := dial(t, h)
		if run == 0 {
			copy(s.Page(0, 0), page)
			if r := s.Put(client.StoreChunk{Key: key, Blocks: []uint32{0, 1}}); r.Chunks[0].Result != client.Stored {
				t.Fatalf("published %+v, want a stored chunk", r)
			}
		}
		s.Poison()
		l := s.Find(key)
		if l.Hits() != 1 {
			t.Fatalf("run %d: %d hits, want 1", run, l.Hits())
		}
		if r := s.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: []uint32{5, 3}}); len(r.Failed) > 0 {
			t.Fatalf("run %d: load %+v, want no failed block", run, r)
		}
		if got := s.Page(0, 5); !bytes.Equal(got, page) {
			t.Errorf("run %d: the page begins with %q, want %q", run, got[:8], page[:8])
		}
		if want := `kvhost_level_hits_total{level="` + wantLevel + `"} 1`; !strings.Contains(get(t, h, "/metrics"), want) {
			t.Errorf("run %d: /metrics lacks %s", run, want)
		}
		if changed, err := h.Reload(t.Context(), c); err != nil || len(changed) > 0 {
			t.Errorf("run %d: a reload of the same configuration changes %v: %v", run, changed, err)
		}
		s.Close()
		stop()
	}
}
