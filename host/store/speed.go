package store

import (
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// speed is a moving average of the bytes per second of single transfers, 0 while none was seen. It counts what one
// request gets, queueing in the device included: that is what a place policy wants to know when it weighs roots.
type speed struct{ bps atomic.Uint64 }

// smallest is the least transfer that says something about bandwidth.
const smallest = 16 << 10

func (s *speed) observe(n int, took time.Duration) {
	if n < smallest || took <= 0 {
		return
	}
	seen := uint64(float64(n) / took.Seconds())
	old := s.bps.Load()
	if old != 0 {
		seen = old + seen/16 - old/16
	}
	s.bps.Store(max(1, seen)) // a concurrent observation may be lost: it is an average
}

// timedFile tells its root how fast transfers were.
type timedFile struct {
	staging.File
	root *root
}

// timed wraps a file where there is a choice of roots to be made.
func (r *root) timed(f staging.File) staging.File {
	if len(r.store.roots) < 2 {
		return f
	}
	return timedFile{f, r}
}

func (f timedFile) ReadAt(p []byte, off int64) (int, error) {
	start := time.Now()
	n, err := f.File.ReadAt(p, off)
	if err == nil {
		f.root.reads.observe(n, time.Since(start))
	}
	return n, err
}

func (f timedFile) WriteAt(p []byte, off int64) (int, error) {
	start := time.Now()
	n, err := f.File.WriteAt(p, off)
	if err == nil {
		f.root.writes.observe(n, time.Since(start))
	}
	return n, err
}
