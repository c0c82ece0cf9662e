package codec

import (
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/payload"
)

var pages = flag.String("pages", "", "files with pages of bf16, with commas, which BenchmarkCodec encodes beside its own")

// BenchmarkCodec encodes and decodes what the figures in host/docs/figures.md are of, on all processors: 64 extents of each kind,
// more than a cache holds twice. Of files it takes all. Since other programs may run, it reports bytes by the processor's time, too. Raw is a copy.
func BenchmarkCodec(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 2))
	var scales [128]float64 // bf16, each channel of a head has a scale
	for i := range scales {
		scales[i] = math.Exp2(1.5 * r.NormFloat64())
	}
	fills := map[string]func(page []byte, seed uint64){
		"channels": func(page []byte, _ uint64) {
			for i := 0; i < len(page); i += 2 {
				bfloat16(r, page[i:i+2], scales[i/2%len(scales)])
			}
		},
	}
	for _, dtype := range []string{payload.BFloat16, payload.FP8} {
		content, err := payload.Of(dtype)
		testenv.OK(b, err)
		fills[dtype] = content.Fill
	}
	kinds := map[string][][]byte{}
	for name, fill := range fills {
		for i := range 64 {
			kinds[name] = append(kinds[name], make([]byte, MaxBytes))
			fill(kinds[name][i], uint64(i))
		}
	}
	for _, file := range strings.FieldsFunc(*pages, func(r rune) bool { return r == ',' }) {
		all, err := os.ReadFile(file)
		testenv.OK(b, err)
		for ; len(all) >= MaxBytes; all = all[MaxBytes:] {
			kinds[filepath.Base(file)] = append(kinds[filepath.Base(file)], all[:MaxBytes])
		}
	}
	for name, extents := range kinds {
		element := 2
		if name == payload.FP8 {
			element = 1
		}
		stored, by, sum := make([][]byte, len(extents)), make([]Codec, len(extents)), 0
		for i := range extents {
			stored[i] = make([]byte, MaxBytes)
			n, codec := Encode(stored[i], extents[i], element)
			stored[i], by[i], sum = stored[i][:n], codec, sum+n
		}
		ratio := float64(len(extents)*MaxBytes) / float64(sum)
		for what, do := range map[string]func(room []byte, i int) error{
			"raw":    func(room []byte, i int) error { copy(room, extents[i]); return nil },
			"encode": func(room []byte, i int) error { Encode(room, extents[i], element); return nil },
			"decode": func(room []byte, i int) error { return Decode(room, stored[i], by[i]) },
		} {
			b.Run(name+"/"+what, func(b *testing.B) {
				b.SetBytes(MaxBytes)
				var next atomic.Int64
				before := processorTime(b)
				b.RunParallel(func(pb *testing.PB) {
					room := make([]byte, MaxBytes)
					for pb.Next() {
						testenv.NoError(b, do(room, int(next.Add(1))%len(extents)))
					}
				})
				b.ReportMetric(float64(b.N)*MaxBytes/float64(processorTime(b)-before), "GB/cpu-s")
				b.ReportMetric(ratio, "ratio")
			})
		}
	}
}

func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	testenv.OK(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
