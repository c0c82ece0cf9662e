package host_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

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
	c := bucketConfiguration(t, fmt.Sprintf("[[root]]\npath = \"s3://bucket/a/b\"\ncapacity = \"1GiB\"\nendpoint = %q\npath_style = true\nprices = [5, 0.4, 0.1, 0]\n", url))
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
		metrics := get(t, h, "/metrics")
		for _, kind := range []string{"requests", "stored"} { // a few seconds are not a day
			_, after, _ := strings.Cut(metrics, `kvhost_bucket_cost_per_day{for="`+kind+`",root="s3://bucket/a/b"} `)
			value, _, _ := strings.Cut(after, "\n")
			if cost, err := strconv.ParseFloat(value, 64); err != nil || cost <= 0 {
				t.Errorf("a day costs %q for %s, want more than nothing", value, kind)
			}
		}
		if r := h.Status().Roots[0]; !strings.Contains(r.Reason, "a day costs ") || !strings.Contains(r.Reason, " 0.00 for bytes read") {
			t.Errorf("the status says %q, want what a day costs", r.Reason)
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

// TestBucketsAreValidated: what has no meaning for a bucket, or for anything else, is refused by name.
func TestBucketsAreValidated(t *testing.T) {
	for name, change := range map[string]func(r *config.Root){
		"path":          func(r *config.Root) { r.Path = "s3://" },
		"route":         func(r *config.Root) { r.Route = config.RouteDirect },
		"require_mount": func(r *config.Root) { r.RequireMount = true },
		"min_free":      func(r *config.Root) { r.MinFree.Bytes = 1 },
		"endpoint":      func(r *config.Root) { r.Endpoint = "s3.example.org" },
		"ca_file":       func(r *config.Root) { r.CAFile = "/none" },
		"prices":        func(r *config.Root) { r.Prices = []float64{1, 2, 3} },
		"prices/NaN":    func(r *config.Root) { r.Prices = []float64{1, 2, 3, math.NaN()} },
		"prices/Inf":    func(r *config.Root) { r.Prices = []float64{1, 2, 3, math.Inf(1)} },
		"region":        func(r *config.Root) { r.Path, r.Region = "/a", "eu-central-1" },
	} {
		c := configuration(t)
		c.Roots = []config.Root{{Path: "s3://bucket/prefix", Capacity: 1 << 30}}
		testenv.OK(t, c.Validate())
		change(&c.Roots[0])
		key, _, _ := strings.Cut(name, "/")
		var problem *config.Problem
		if err := c.Validate(); !errors.As(err, &problem) || problem.Path != "root[0]."+key {
			t.Errorf("root in a bucket with %s: got %v", name, err)
		}
	}
}
