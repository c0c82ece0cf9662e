package staging

import (
	"sync/atomic"
	"time"
)

// Bandwidth is the bytes per second of single transfers, by a moving average of the time of a byte over the last
// sixteen; 0 before the first. It includes the queueing in the device, because a place policy weighs roots by the speed
// of one request. Other work on bytes can be observed, too.
type Bandwidth struct {
	bps  atomic.Uint64
	seen atomic.Int64
}

// smallest is the least size in bytes of a transfer that is observed: a smaller one shows latency, not bandwidth.
const smallest = 16 << 10

// BytesPerSecond returns the average.
func (b *Bandwidth) BytesPerSecond() uint64 { return b.bps.Load() }

// Observe enters a transfer of n bytes.
func (b *Bandwidth) Observe(n int64, took time.Duration) {
	if n < smallest || took <= 0 {
		return
	}
	aByte := took.Seconds() / float64(n)
	if old := b.bps.Load(); old != 0 {
		n := float64(min(b.seen.Add(1)+1, 16))
		aByte = (aByte + (n-1)/float64(old)) / n
	}
	b.bps.Store(max(1, uint64(1/aByte))) // a concurrent observation may be lost: it is an average
}

// Meter observes the transfers of files.
type Meter struct {
	Reads, Writes Bandwidth
	Now           func() time.Time
}

// Speeds returns the bytes per second of writes and reads.
func (m *Meter) Speeds() (write, read uint64) {
	return m.Writes.BytesPerSecond(), m.Reads.BytesPerSecond()
}

// File returns f with its transfers observed.
func (m *Meter) File(f File) File { return meteredFile{f, m} }

type meteredFile struct {
	File
	meter *Meter
}

func (f meteredFile) ReadAt(p []byte, off int64) (int, error) {
	start := f.meter.Now()
	n, err := f.File.ReadAt(p, off)
	if err == nil {
		f.meter.Reads.Observe(int64(n), f.meter.Now().Sub(start))
	}
	return n, err
}

func (f meteredFile) WriteAt(p []byte, off int64) (int, error) {
	start := f.meter.Now()
	n, err := f.File.WriteAt(p, off)
	if err == nil {
		f.meter.Writes.Observe(int64(n), f.meter.Now().Sub(start))
	}
	return n, err
}

// Memory implements [MemoryFile]. [Moved] enters transfers of that memory.
func (f meteredFile) Memory(n int64) (Segments, error) { return MemoryOf(f.File, n) }

// Shrink implements [MemoryFile].
func (f meteredFile) Shrink(n int64) error { return Shrink(f.File, n) }

// Moved enters a transfer of n bytes between a file's memory and pages, in place of a read or a write.
func Moved(f File, kind Kind, n int64, took time.Duration) {
	m, ok := f.(meteredFile)
	switch {
	case !ok:
	case kind == Write:
		m.meter.Writes.Observe(n, took)
	default:
		m.meter.Reads.Observe(n, took)
	}
}
