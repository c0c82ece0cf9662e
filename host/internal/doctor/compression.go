package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/staging"
)

// CodecFacts are what the processor's codec does with pages of bf16.
type CodecFacts struct {
	Encode uint64  `json:"encode_bytes_per_second"` // of pages, in one worker while the others run
	Decode uint64  `json:"decode_bytes_per_second"`
	Ratio  float64 `json:"ratio"` // page bytes over stored bytes; 0: not measured
}

// bfloat16 is what the measurements write and code: some file systems compress, too.
var bfloat16, _ = payload.Of(payload.BFloat16)

// How much each worker moves at most.
const (
	sampleExtents = 16      // through the codec
	samplePart    = 1 << 20 // with one call
	sampleParts   = 4
	sampleTime    = time.Second // after which no further part is begun
)

// measureCodec runs the codec in so many workers.
func measureCodec(workers int) CodecFacts {
	var encode, decode staging.Bandwidth
	var pages, stored atomic.Int64
	var work errgroup.Group
	for i := range workers {
		work.Go(func() error {
			var page, coded, back [codec.MaxBytes]byte
			bfloat16.Fill(page[:], uint64(i))
			for range sampleExtents {
				start := time.Now()
				n, by := codec.Encode(coded[:], page[:], 2)
				encode.Observe(codec.MaxBytes, time.Since(start))
				pages.Add(codec.MaxBytes)
				stored.Add(int64(n))
				start = time.Now()
				if err := codec.Decode(back[:], coded[:n], by); err != nil {
					return err
				}
				decode.Observe(codec.MaxBytes, time.Since(start))
			}
			return nil
		})
	}
	if work.Wait() != nil {
		return CodecFacts{}
	}
	return CodecFacts{encode.BytesPerSecond(), decode.BytesPerSecond(), float64(pages.Load()) / float64(stored.Load())}
}

// measure writes a file in each of so many workers, and reads it back, as a host's transfers do.
func (r *Root) measure(ctx context.Context, workers int, direct bool) {
	fs, meter := staging.OS(), staging.Meter{Now: time.Now}
	if !direct {
		fs = staging.Buffered(fs)
	}
	if need := int64(workers) * sampleParts * samplePart; r.Available < need {
		r.Unmeasured = fmt.Sprintf("%s are free, and the measurement takes %s", config.SizeText(r.Available), config.SizeText(need))
		return
	}
	slots, err := staging.NewSlots(workers, samplePart)
	if err != nil {
		r.Unmeasured = err.Error()
		return
	}
	defer slots.Close()
	work, ctx := errgroup.WithContext(ctx)
	for i := range workers {
		name := filepath.Join(r.Tried, fmt.Sprintf(".kvhost-check-%d.%d", os.Getpid(), i))
		work.Go(func() (err error) {
			slot, err := slots.Acquire(ctx)
			if err != nil {
				return err
			}
			defer slot.Release()
			bfloat16.Fill(slot.Bytes(), uint64(i))
			f, err := staging.OpenDirect(fs, name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
			if err != nil {
				return err
			}
			defer os.Remove(name)
			defer f.Close()
			return sample(ctx, meter.File(f), slot.Bytes())
		})
	}
	if err := work.Wait(); err != nil {
		r.Unmeasured = err.Error()
		return
	}
	r.Write, r.Read = meter.Speeds()
}

// sample writes parts of a file for a while, and reads them.
func sample(ctx context.Context, f staging.File, part []byte) error {
	written, start := int64(0), time.Now()
	for ; written < sampleParts && (written == 0 || time.Since(start) < sampleTime) && ctx.Err() == nil; written++ {
		if _, err := f.WriteAt(part, written*samplePart); err != nil {
			return err
		}
	}
	for i := range written {
		if _, err := f.ReadAt(part, i*samplePart); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// judgeCompression says of each root what compression does there, and why.
func (r *Report) judgeCompression(c *config.Config, f *Facts) {
	modes := c.Modes()
	gains, chooses := modes.Any(codec.Gaining), modes.Any(codec.Faster)
	if !gains && !chooses {
		return
	}
	some := false
	for i := range f.Roots {
		root, about := &f.Roots[i], "root "+f.Roots[i].Path
		s := codec.Speeds{Write: root.Write, Read: root.Read, Encode: f.Codec.Encode, Decode: f.Codec.Decode}
		least, known := s.Least(false)
		some = some || c.Compresses(c.Roots[i])
		switch {
		case !c.Compresses(c.Roots[i]):
			r.find(Note, about, "", "shared roots are never compressed")
			continue
		case root.Memory && !gains:
			r.find(Note, about, "", `"auto" compresses chunks once the codec is seen to take no more than a plain copy, as a GPU's does`)
			continue
		case root.Memory:
			continue
		case root.unusable() != "":
			continue
		case !known:
			r.find(Note, about, "", "what compression does there is not measured: %s", root.Unmeasured)
			continue
		}
		if gains {
			fix, takes := "", s.Takes(f.Codec.Ratio)
			if takes > 1 {
				fix = `compression = "auto" if time is what counts`
			}
			r.find(Note, about, fix, `"huffman" makes room for %.2f times as many chunks in bf16. Written once and read twice, they take %.2f times the time, with the processor's codec: %s`,
				f.Codec.Ratio, takes, s.Says(false))
		}
		if chooses && least <= f.Codec.Ratio {
			r.find(Note, about, "", `"auto" would compress chunks in bf16, ratio %.2f, with the processor's codec: %s`, f.Codec.Ratio, s.Says(false))
		} else if chooses {
			r.find(Note, about, `compression = "huffman" where capacity is what counts, else "off"`,
				`"auto" would store chunks in bf16 as they are, with the processor's codec: %s`, s.Says(false))
		}
	}
	if !some {
		r.find(Warning, "compression", `compression = "off", or a root in a directory that no other host shares`,
			"no root may hold compressed chunks")
	}
}
