package codec

import (
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"

	"github.com/kvhost/kvhost/staging"
)

// Speeds are speeds in bytes per second that one worker gets while the others work: Write and Read of files, Encode and Decode
// of pages in the codec. 0 means not measured yet. For a root in memory, Write and Read are plain copies between the memory and
// pages. The codec's time then includes the transfer over the bus, so a compressed piece takes longer only by the difference
// between the two.
type Speeds struct {
	Write, Read, Encode, Decode uint64
	Memory                      bool
}

// margin is the part of the plain time that compression may take at most before it is begun. Once begun, it continues for as
// long as it saves anything.
const margin = 0.95

// spare is the part of a plain copy's time in memory that the codec may take. A trial shares the bus with plain copies, so its
// own time does not show what it saves them. On an H200, trials took a quarter longer than plain copies, but a root full of
// compressed chunks was stored and loaded 1.4 times as fast. The codec of a processor takes many times as long as a plain copy.
const spare = 0.5

// Root decides for one root how much a chunk must gain to be compressed. It uses the speeds that are measured as chunks are
// stored and loaded.
type Root struct {
	Speeds func() Speeds
	Log    *slog.Logger
	Memory bool // the root is in this host's memory

	state atomic.Int32 // decision for chunks with the ratio Usual
}

// Decisions for chunks with the ratio Usual.
const (
	unknown = iota
	plain
	compressed
)

// Root returns the decisions for a root, based on the measured speeds of its files, or of copies between its memory and pages.
// If speeds is not nil, it replaces all measurements.
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

// Least returns the least ratio with which a chunk should be compressed now. It is infinite if no chunk should. It logs a
// change of the decision for chunks with the ratio Usual.
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

// Why describes the measurements and the conclusion.
func (r *Root) Why() string { return r.speeds().Says(r.state.Load() == compressed) }

// Says describes the speeds and the conclusion.
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

// times returns the time for a byte that is written once and read twice: in the file, and in the codec. A direction counts once
// both of its speeds are known. A worker does one after the other, so any overlap between workers is an additional gain.
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

// Least returns the least ratio of page bytes to stored bytes with which compression pays. If begun is set, the root compresses
// already, and any saved time counts. Otherwise the saving must exceed a margin, so that the choice does not alternate. The
// ratio is infinite if compression does not pay. It is known once a direction counts.
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
