package bench_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host/internal/bench"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

func small(t *testing.T) bench.Config {
	return bench.Config{
		FS: staging.OS(), Dir: t.TempDir(), Geometry: kv.Uniform(4, 5, 2, 18432), DType: payload.BFloat16, Chunks: 3, Rounds: 2, Copiers: 2,
		Engine: transfer.Config{Threads: 2, SlotBytes: 1 << 20, MaxStaging: 8 << 20, ReadRatio: 0.75},
	}
}

// The bench moves every byte right, tells four rows and leaves nothing behind, for host memory and on the double's GPU. No
// figure is told.
func TestRowsAreFilled(t *testing.T) {
	for _, k := range []struct{ onGPU, inMemory bool }{{}, {onGPU: true}, {inMemory: true}, {true, true}} {
		c := small(t)
		c.InMemory = k.inMemory
		if k.onGPU {
			c.GPU = doubleGPU(t)
		}
		rows, err := bench.Run(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if len(rows) != 4 || rows[3].First == nil || rows[3].First.Mid <= 0 || rows[3].First.Mid > 1 {
			t.Fatalf("%+v", rows)
		}
		for _, r := range rows {
			if (r.Route == "memory") != k.inMemory {
				t.Errorf("route %s", r.Route)
			}
			if r.Ours <= 0 || r.Copy <= 0 || (r.Plain <= 0) != k.inMemory || r.Ratio.Low > r.Ratio.High || r.Route == "" {
				t.Errorf("%+v", r)
			}
		}
		var b strings.Builder
		if err := bench.Write(&b, rows); err != nil || strings.Count(b.String(), "\n") != 8 {
			t.Errorf("%v\n%s", err, b.String())
		}
		if left, _ := os.ReadDir(c.Dir); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

// The settings of compression are measured beside each other, from host memory and from the double's GPU: what is compressed
// takes less room, and every byte comes back. What cannot be compressed takes what it is.
func TestCompressionBesideOff(t *testing.T) {
	for _, k := range []struct {
		onGPU       bool
		dtype       string
		least, most float64
	}{{false, payload.BFloat16, 1.35, 1.5}, {true, payload.BFloat16, 1.35, 1.5}, {false, payload.FP8, 1.15, 1.25}, {false, payload.U8, 0.9, 1}} {
		c := small(t)
		c.Compression, c.DType = []string{"huffman", "off", "auto"}, k.dtype
		if k.onGPU {
			c.GPU = doubleGPU(t)
		}
		rows, err := bench.Run(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if len(rows) != 12 {
			t.Fatalf("%+v", rows)
		}
		for i, r := range rows {
			if r.Compression != c.Compression[i/4] || r.Pass != rows[i%4].Pass || (r.Gain == nil) != (r.Compression == "off") {
				t.Errorf("row %d: %+v", i, r)
			}
			least, most := 0.9, 1.0
			if r.Compression == "huffman" {
				least, most = k.least, k.most
			}
			if r.Compression != "auto" && (r.Stored < least || r.Stored > most) {
				t.Errorf("%s, %s: page bytes are %.3f times what is stored, want %g to %g", k.dtype, r.Compression, r.Stored, least, most)
			}
		}
		if left, _ := os.ReadDir(c.Dir); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

// doubleGPU is the double's first.
func doubleGPU(t *testing.T) *gds.GPU {
	t.Helper()
	d, err := gds.Open(nil, gdstest.Build(t).Path)
	if err != nil {
		t.Fatal(err)
	}
	devices, err := d.Devices()
	if err != nil {
		t.Fatal(err)
	}
	gpu, err := d.OpenGPU(devices[0].UUID, gds.Config{Threads: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { gpu.Close() })
	return gpu
}

// What is removed between the rounds, and in the end, cuFile keeps no descriptor of: its blocks would stay in use.
func TestDirectLetsGoOfWhatIsRemoved(t *testing.T) {
	double := gdstest.Build(t)
	d, err := gds.Open(nil, double.Path)
	if err != nil {
		t.Fatal(err)
	}
	devices, err := d.Devices()
	if err != nil {
		t.Fatal(err)
	}
	c := small(t)
	if c.GPU, err = d.OpenGPU(devices[0].UUID, gds.Config{Threads: 2, Files: 2}); err != nil {
		t.Fatal(err)
	}
	defer c.GPU.Close()
	lib, err := gds.LoadCuFile(double.Path)
	if err != nil {
		t.Fatal(err)
	}
	if lost := c.GPU.DoFile(func(t *gds.Thread) { err = lib.Open(t) }); lost != nil || err != nil {
		t.Fatal(lost, err)
	}
	if c.Direct, err = gds.NewDirectRoute(c.GPU, lib,
		gds.DirectConfig{BufferBytes: 64 << 20, Handles: 64}); err != nil {
		t.Fatal(err)
	}
	defer c.Direct.Close()
	if _, err := bench.Run(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if s := c.Direct.Handles.Stats(); s.Open != 0 || s.Misses == 0 {
		t.Errorf("%+v", s)
	}
}

func TestBenchFails(t *testing.T) {
	c := small(t)
	c.Chunks = 0
	if _, err := bench.Run(t.Context(), c); !errors.Is(err, bench.ErrConfig) {
		t.Error(err)
	}
	c = small(t)
	c.DType = "fp4"
	if _, err := bench.Run(t.Context(), c); !errors.Is(err, bench.ErrConfig) {
		t.Error(err)
	}
	c = small(t)
	c.FS = faultfs.New(staging.OS(), faultfs.MustRules("write *.kv* 5th-: eio")...)
	if _, err := bench.Run(t.Context(), c); !errors.Is(err, bench.ErrPath) {
		t.Error(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if _, err := bench.Run(ctx, small(t)); err == nil {
		t.Error("it ran")
	}
}

// reads counts the bytes that are read of pieces.
type reads struct {
	staging.FS
	bytes atomic.Int64
}

func (r *reads) OpenFile(name string, flag int, mode os.FileMode) (staging.File, error) {
	f, err := r.FS.OpenFile(name, flag, mode)
	if err != nil || strings.Contains(name, "/plain/") {
		return f, err
	}
	return countedFile{f, &r.bytes}, nil
}

type countedFile struct {
	staging.File
	bytes *atomic.Int64
}

func (f countedFile) ReadAt(p []byte, off int64) (int, error) {
	f.bytes.Add(int64(len(p)))
	return f.File.ReadAt(p, off)
}

// Nobody has read a byte of the pieces before the first load of a round, and the later loads read them again.
func TestFirstLoadReadsFreshFiles(t *testing.T) {
	c := small(t)
	files := &reads{FS: c.FS}
	c.FS = files
	all := int64(c.Chunks) * c.Geometry.PageBytes()
	var passes []string
	c.Profile = func(pass string, round int) (func(), error) {
		passes = append(passes, pass)
		n := files.bytes.Swap(0)
		switch {
		case pass == "load-first" && n != 0:
			t.Errorf("round %d: %d bytes of pieces were read before the first load", round, n)
		case pass == "load-again" && n < all, pass == "layers" && n < all:
			t.Errorf("round %d: the pass before %s read %d bytes, at least %d are due", round, pass, n, all)
		}
		return func() {}, nil
	}
	if _, err := bench.Run(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(strings.Join(passes, " "), "store load-first load-again layers"); n != c.Rounds+1 {
		t.Errorf("%v", passes)
	}
}
