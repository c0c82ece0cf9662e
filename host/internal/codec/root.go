package codec

import (
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"

	"github.com/kvhost/kvhost/staging"
)

// Speeds are bytes per second that one worker gets while the others work: of files to and from a root, and of pages through
// the codec. 0 is not measured yet. Those of memory are of plain copies between it and pages: what the codec takes beyond
// them is all that a compressed piece takes longer, because the bytes that the bus is spared are in it.
type Speeds struct {
	Write, Read, Encode, Decode uint64
	Memory                      bool
}

// What compression must save before it is begun. It goes on for as long as it saves anything.
const margin = 0.95

// spare is what the codec may take of a plain copy's time in memory. A trial shares the bus with plain copies, so what it
// spares them does not show in its own time: on an H200 trials took a quarter longer than plain copies, and a root full of
// compressed chunks was stored and loaded 1.4 times as fast. A processor's codec takes many times a plain copy's time.
const spare = 0.5

// Root decides for one root how much a chunk must gain to be compressed, by what is measured as chunks are stored and loaded.
type Root struct {
	Speeds func() Speeds
	Log    *slog.Logger
	Memory bool // its files are this host's memory

	state atomic.Int32 // of bf16
}

// What is done with chunks of the usual ratio.
const (
	unknown = iota
	plain
	compressed
)

// Root decides for a root by the measured speeds of its files, or of copies between its memory and pages. If speeds is not
// nil it is asked instead of them and of the codec.
func (s *Set) Root(files *staging.Meter, memory bool, speeds func() Speeds, log *slog.Logger) *Root {
	if speeds == nil {
		speeds = func() (now Speeds) {
			now.Write, now.Read = files.Speeds()
			now.Encode, now.Decode = s.encoding.BytesPerSecond(), s.decoding.BytesPerSecond()
			return now
		}
	}
	return &Root{Speeds: speeds, Log: log, Memory: memory}
}

// Least is the ratio from which on a chunk is to be compressed now; infinite if none is. It logs what changes for chunks of
// the usual ratio.
func (r *Root) Least() float64 {
	s, was := r.speeds(), r.state.Load()
	least, known := s.Least(was == compressed)
	now := int32(plain)
	switch {
	case !known:
		now = unknown
	case least <= Usual:
		now = compressed
	}
	if now != was && r.state.CompareAndSwap(was, now) {
		r.Log.Info("compression chosen", "compressed", now == compressed, "why", r.Why())
	}
	return least
}

func (r *Root) speeds() Speeds {
	s := r.Speeds()
	s.Memory = r.Memory
	return s
}

// Why says what was measured, and what follows.
func (r *Root) Why() string { return r.speeds().Says(r.state.Load() == compressed) }

// Says tells the speeds, and what follows.
func (s Speeds) Says(begun bool) string {
	least, known := s.Least(begun)
	const gb = 1e9
	figures := fmt.Sprintf("a worker writes %.2f and reads %.2f GB/s, and the codec's are %.2f and %.2f GB/s",
		float64(s.Write)/gb, float64(s.Read)/gb, float64(s.Encode)/gb, float64(s.Decode)/gb)
	switch {
	case !known:
		return "not measured yet"
	case s.Memory && least == Always:
		return figures + ": the codec takes no more than a plain copy"
	case math.IsInf(least, 1):
		return figures + ": the codec takes longer than it saves"
	}
	return fmt.Sprintf("%s: it saves time from a ratio of %.2f on", figures, least)
}

// times are those of a byte that is written once and read twice, in the file and in the codec. A direction counts once both
// its speeds are known. In one worker they take turns, so what workers gain by doing them at the same time is on top.
func (s Speeds) times() (file, codec float64) {
	add := func(times float64, f, c uint64) {
		if f > 0 && c > 0 {
			file, codec = file+times/float64(f), codec+times/float64(c)
		}
	}
	add(1, s.Write, s.Encode)
	add(2, s.Read, s.Decode)
	return file, codec
}

// Least is the ratio from which on compressing saves time, infinite if none does; where it was begun, any time. It is known
// once a direction counts.
func (s Speeds) Least(begun bool) (ratio float64, known bool) {
	file, codec := s.times()
	if s.Memory {
		if file > 0 && codec <= spare*file {
			return Always, true
		}
		return math.Inf(1), file > 0
	}
	most := file
	if !begun {
		most *= margin
	}
	if most <= codec {
		return math.Inf(1), file > 0
	}
	return max(Always, file/(most-codec)), true
}
