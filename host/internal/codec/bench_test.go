package codec

import (
	"math"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/payload"
)

// pages are what the figures in host/docs/figures.md are of.
type pages struct {
	name    string
	extents [][]byte
	element int
}

// benchmarked are 64 extents of each kind, more than a cache holds twice.
func benchmarked(b *testing.B) (list []pages) {
	fill := func(name string, element int, fill func(b []byte, seed uint64)) {
		p := pages{name: name, element: element}
		for i := range 64 {
			extent := make([]byte, MaxBytes)
			fill(extent, uint64(i))
			p.extents = append(p.extents, extent)
		}
		list = append(list, p)
	}
	for dtype, element := range map[string]int{payload.BFloat16: 2, payload.FP8: 1} {
		content, err := payload.Of(dtype)
		if err != nil {
			b.Fatal(err)
		}
		fill(dtype, element, content.Fill)
	}
	r := rand.New(rand.NewPCG(1, 2))
	var scales [128]float64 // bf16, each channel of a head has a scale
	for i := range scales {
		scales[i] = math.Exp2(1.5 * r.NormFloat64())
	}
	fill("channels", 2, func(b []byte, _ uint64) {
		for i := 0; i < len(b); i += 2 {
			bfloat16(r, b[i:i+2], scales[i/2%len(scales)])
		}
	})
	return list
}

// coding is a way to store extents, for one goroutine.
type coding struct {
	encode func(extent []byte, element int) (stored [][]byte, by Codec) // valid until the next call
	decode func(dst []byte, stored [][]byte, by Codec, element int) error
}

// codings are those that are compared: copies, and this package's.
func codings() (names []string, list map[string]func() (coding, error)) {
	list = map[string]func() (coding, error){
		"raw": func() (coding, error) {
			room := make([]byte, MaxBytes)
			return coding{
				func(extent []byte, _ int) ([][]byte, Codec) { copy(room, extent); return [][]byte{room}, Raw },
				func(dst []byte, stored [][]byte, _ Codec, _ int) error { copy(dst, stored[0]); return nil },
			}, nil
		},
		"huffman": func() (coding, error) {
			room := make([]byte, MaxBytes)
			return coding{
				func(extent []byte, element int) ([][]byte, Codec) {
					n, by := Encode(room, extent, element)
					return [][]byte{room[:n]}, by
				},
				func(dst []byte, stored [][]byte, by Codec, _ int) error { return Decode(dst, stored[0], by) },
			}, nil
		},
	}
	names = []string{"raw", "huffman"}
	return names, list
}

// everyCoding runs fn for each way to store each kind of pages.
func everyCoding(b *testing.B, fn func(b *testing.B, p pages, open func() (coding, error))) {
	names, list := codings()
	for _, p := range benchmarked(b) {
		for _, name := range names {
			b.Run(p.name+"/"+name, func(b *testing.B) { fn(b, p, list[name]) })
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	everyCoding(b, func(b *testing.B, p pages, open func() (coding, error)) {
		var raw, kept atomic.Int64
		measure(b, runtime.GOMAXPROCS(0), MaxBytes, func(int) (func(i int) error, error) {
			c, err := open()
			return func(i int) error {
				stored, _ := c.encode(p.extents[i%len(p.extents)], p.element)
				for _, part := range stored {
					kept.Add(int64(len(part)))
				}
				raw.Add(MaxBytes)
				return nil
			}, err
		})
		b.ReportMetric(float64(raw.Load())/float64(kept.Load()), "ratio")
	})
}

func BenchmarkDecode(b *testing.B) {
	everyCoding(b, func(b *testing.B, p pages, open func() (coding, error)) {
		c, err := open()
		if err != nil {
			b.Fatal(err)
		}
		stored, by := make([][][]byte, len(p.extents)), make([]Codec, len(p.extents))
		for i, extent := range p.extents {
			var parts [][]byte
			parts, by[i] = c.encode(extent, p.element)
			for _, part := range parts {
				stored[i] = append(stored[i], append([]byte(nil), part...))
			}
		}
		measure(b, runtime.GOMAXPROCS(0), MaxBytes, func(int) (func(i int) error, error) {
			c, err := open()
			got := make([]byte, MaxBytes)
			return func(i int) error {
				i %= len(stored)
				return c.decode(got, stored[i], by[i], p.element)
			}, err
		})
	})
}

// measure runs work of so many bytes on goroutines, each of which open readies, and reports bytes by the clock and, since
// other programs may run, by the processor's time.
func measure(b *testing.B, goroutines int, bytes int64, open func(goroutine int) (func(i int) error, error)) {
	b.SetBytes(bytes)
	list := make([]func(i int) error, goroutines)
	for i := range list {
		var err error
		if list[i], err = open(i); err != nil {
			b.Fatal(err)
		}
	}
	var next atomic.Int64
	var work errgroup.Group
	before := processorTime(b)
	b.ResetTimer()
	for _, do := range list {
		work.Go(func() error {
			for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
				if err := do(int(i)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := work.Wait()
	b.StopTimer()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(b.N)*float64(bytes)/float64(processorTime(b)-before), "GB/cpu-s")
}

func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
