package codec

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// benchmarked are the pages that the figures in BENCHMARKS.md are of: 64 extents, more than a cache holds twice.
func benchmarked() map[string]struct {
	extents [][]byte
	element int
} {
	r := rand.New(rand.NewPCG(1, 2))
	pages := func(fill func(b []byte)) (list [][]byte) {
		for range 64 {
			b := make([]byte, MaxBytes)
			fill(b)
			list = append(list, b)
		}
		return list
	}
	type data = struct {
		extents [][]byte
		element int
	}
	var scales [128]float64
	for i := range scales {
		scales[i] = math.Exp2(1.5 * r.NormFloat64())
	}
	return map[string]data{
		"bf16": {pages(func(b []byte) { bfloat16(r, b, 1) }), 2},
		"channels": {pages(func(b []byte) { // bf16, each channel of a head has a scale
			for i := 0; i < len(b); i += 2 {
				bfloat16(r, b[i:i+2], scales[i/2%len(scales)])
			}
		}), 2},
		"fp8": {pages(func(b []byte) { e4m3(r, b, 1) }), 1},
	}
}

func BenchmarkEncode(b *testing.B) {
	for name, d := range benchmarked() {
		stored := make([]byte, MaxBytes)
		b.Run(name+"/huffman", func(b *testing.B) {
			var raw, kept int
			measure(b, func(i int) {
				n, _ := Encode(stored, d.extents[i%len(d.extents)], d.element)
				raw, kept = raw+MaxBytes, kept+n
			})
			b.ReportMetric(float64(raw)/float64(kept), "ratio")
		})
		b.Run(name+"/zstd", func(b *testing.B) {
			e := fastest(b)
			var out []byte
			planes := make([]byte, MaxBytes)
			var raw, kept int
			measure(b, func(i int) {
				out = out[:0]
				for _, plane := range inPlanes(planes, d.extents[i%len(d.extents)], d.element) {
					out = e.EncodeAll(plane, out)
				}
				raw, kept = raw+MaxBytes, kept+len(out)
			})
			b.ReportMetric(float64(raw)/float64(kept), "ratio")
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	for name, d := range benchmarked() {
		var huffman [][]byte
		var frames [][][]byte // of each extent's planes
		var by []Codec
		e := fastest(b)
		planes, got := make([]byte, MaxBytes), make([]byte, MaxBytes)
		for _, extent := range d.extents {
			stored := make([]byte, MaxBytes)
			n, codec := Encode(stored, extent, d.element)
			huffman, by = append(huffman, stored[:n]), append(by, codec)
			var list [][]byte
			for _, plane := range inPlanes(planes, extent, d.element) {
				list = append(list, e.EncodeAll(plane, nil))
			}
			frames = append(frames, list)
		}
		b.Run(name+"/huffman", func(b *testing.B) {
			measure(b, func(i int) {
				if err := Decode(got, huffman[i%len(huffman)], by[i%len(by)]); err != nil {
					b.Fatal(err)
				}
			})
		})
		b.Run(name+"/zstd", func(b *testing.B) {
			z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
			if err != nil {
				b.Fatal(err)
			}
			defer z.Close()
			measure(b, func(i int) {
				out := planes[:0]
				for _, frame := range frames[i%len(frames)] {
					if out, err = z.DecodeAll(frame, out); err != nil {
						b.Fatal(err)
					}
				}
				if d.element == 2 {
					join(got, out[:MaxBytes/2], out[MaxBytes/2:])
				}
			})
		})
	}
}

func fastest(b *testing.B) *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	if err != nil {
		b.Fatal(err)
	}
	return e
}

// inPlanes is what zstd is given: the extent's planes, each a frame.
func inPlanes(room, extent []byte, element int) [][]byte {
	if element != 2 {
		return [][]byte{extent}
	}
	lo, hi := room[:MaxBytes/2], room[MaxBytes/2:]
	split(lo, hi, extent)
	return [][]byte{lo, hi}
}

// measure runs work on an extent at a time, and reports bytes by the processor's time: other programs may run.
func measure(b *testing.B, work func(i int)) {
	b.ReportAllocs()
	before := processorTime(b)
	for i := 0; b.Loop(); i++ {
		work(i)
	}
	b.ReportMetric(float64(b.N)*MaxBytes/float64(processorTime(b)-before), "GB/cpu-s")
}

func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
