package files

import (
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// Sequence generates values that must never repeat or decrease: times of events, store times and numbers of temporary files. A
// store has one. It is safe for concurrent use and has no lock.
type Sequence struct {
	now       func() time.Time
	host      string
	start     time.Time
	stamps    atomic.Int64 // latest store time
	numbers   atomic.Uint64
	firstTemp uint64
}

// Init starts the sequence of a host.
func (s *Sequence) Init(now func() time.Time, host string) {
	s.now, s.host, s.start = now, host, now()
	s.firstTemp = uint64(s.start.UnixNano())
	s.numbers.Store(s.firstTemp)
}

// Clock returns the time for events: nanoseconds since the store was opened.
func (s *Sequence) Clock() uint64 { return uint64(max(0, s.now().Sub(s.start))) }

// farAhead is the most that the latest store time may be ahead of the clock. A store time beyond that came from a wrong clock.
const farAhead = time.Hour

// Stamp returns a store time. Store times are distinct and increasing, so that a scan can determine the order of stores. They
// restart from the clock if the latest one is too far ahead of it.
func (s *Sequence) Stamp() int64 {
	now := s.now().UnixNano()
	for {
		last := s.stamps.Load()
		next := max(now, last+1)
		if last > now+int64(farAhead) {
			next = now
		}
		if s.stamps.CompareAndSwap(last, next) {
			return next
		}
	}
}

// StampsFrom makes later store times greater than last, which is a store time of an earlier run.
func (s *Sequence) StampsFrom(last int64) {
	if last > s.now().Add(farAhead).UnixNano() {
		return
	}
	for {
		now := s.stamps.Load()
		if last <= now || s.stamps.CompareAndSwap(now, last) {
			return
		}
	}
}

// Number returns a number for the name of a file.
func (s *Sequence) Number() uint64 { return s.numbers.Add(1) }

// TempName returns a new temporary name in the directory of target.
func (s *Sequence) TempName(target string) string {
	return pieceformat.TempName(target, s.host, s.Number())
}

// Wrote reports whether this run created a temporary file of this host.
func (s *Sequence) Wrote(t pieceformat.Temp) bool {
	return t.Seq > s.firstTemp && t.Seq <= s.numbers.Load()
}
