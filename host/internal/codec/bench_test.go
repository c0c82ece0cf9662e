package codec

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/staging"
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

// codings are those that the table compares: copies, this package's, and zstd over byte planes, a frame for each.
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
	for _, level := range []zstd.EncoderLevel{zstd.SpeedFastest, zstd.SpeedDefault, zstd.SpeedBetterCompression} {
		name := "zstd-" + level.String()
		names = append(names, name)
		list[name] = func() (coding, error) { return zstdCoding(level) }
	}
	return names, list
}

func zstdCoding(level zstd.EncoderLevel) (coding, error) {
	w, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(level), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return coding{}, err
	}
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return coding{}, err
	}
	room, planes := make([]byte, 2*MaxBytes), make([]byte, MaxBytes)
	encode := func(extent []byte, element int) (frames [][]byte, _ Codec) {
		out := room[:0]
		for _, plane := range inPlanes(planes, extent, element) {
			from := len(out)
			out = w.EncodeAll(plane, out)
			frames = append(frames, out[from:])
		}
		return frames, Raw
	}
	decode := func(dst []byte, frames [][]byte, _ Codec, element int) error {
		out := planes[:0]
		for _, frame := range frames {
			if out, err = z.DecodeAll(frame, out); err != nil {
				return err
			}
		}
		if element == 2 {
			join(dst, out[:MaxBytes/2], out[MaxBytes/2:])
		} else {
			copy(dst, out)
		}
		return nil
	}
	return coding{encode, decode}, nil
}

// inPlanes is what zstd is given: the extent's planes.
func inPlanes(room, extent []byte, element int) [][]byte {
	if element != 2 {
		return [][]byte{extent}
	}
	lo, hi := room[:MaxBytes/2], room[MaxBytes/2:]
	split(lo, hi, extent)
	return [][]byte{lo, hi}
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

// BenchmarkFiles writes and reads files of 32 MiB in directories, past the page cache where that is possible, as many at a
// time as a host has threads. KVHOST_BENCH_DIRS names the directories, separated by colons.
func BenchmarkFiles(b *testing.B) {
	const threads, part, parts = 16, 1 << 20, 32
	dirs := os.Getenv("KVHOST_BENCH_DIRS")
	if dirs == "" {
		dirs = os.TempDir() + ":/dev/shm"
	}
	for dir := range strings.SplitSeq(dirs, ":") {
		for _, way := range []string{"write", "read"} {
			b.Run(strings.Trim(strings.ReplaceAll(dir, "/", "-"), "-")+"/"+way, func(b *testing.B) {
				mine, err := os.MkdirTemp(dir, "kvhost-bench-")
				if err != nil {
					b.Fatal(err)
				}
				defer os.RemoveAll(mine)
				slots, err := staging.NewSlots(threads, part)
				if err != nil {
					b.Fatal(err)
				}
				defer slots.Close()
				measure(b, threads, part, func(thread int) (func(i int) error, error) {
					slot, err := slots.Acquire(b.Context())
					if err != nil {
						return nil, err
					}
					f, err := staging.OpenDirect(staging.OS(), filepath.Join(mine, fmt.Sprint(thread)), os.O_CREATE|os.O_RDWR, 0o600)
					if err != nil {
						return nil, err
					}
					b.Cleanup(func() { f.Close(); slot.Release() })
					done := 0
					if way == "read" {
						for at := range parts {
							if _, err := f.WriteAt(slot.Bytes(), int64(at)*part); err != nil {
								return nil, err
							}
						}
					}
					return func(int) error {
						at := int64(done%parts) * part
						done++
						if way == "read" {
							_, err := f.ReadAt(slot.Bytes(), at)
							if err == io.EOF {
								err = nil
							}
							return err
						}
						_, err := f.WriteAt(slot.Bytes(), at)
						return err
					}, nil
				})
			})
		}
	}
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
