package store

import (
	"context"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/staging"
)

// Limits of the measurement of read speed. The disks of virtual machines
// often grant a burst at many times their speed after a pause, so reads within speedBurst of the start do not count.
const (
	speedReaders = 8
	speedFiles   = 4 * speedReaders
	speedPart    = 1 << 20
	speedBurst   = 400 * time.Millisecond
	speedTime    = time.Second
	memoryPart   = 8 << 20
	memoryCopies = 8
)

// mostAwaited is the longest time that background work waits for loads.
const mostAwaited = 100 * time.Millisecond

// AwaitLoads waits until no load is running, for a limited time.
func (s *Store) AwaitLoads() { _ = s.loads.Await(s.run, mostAwaited) }

// MeasureReads measures the speed of reads from memory, and from each directory as soon as it has some pieces. It does so in
// the background and reports bytes a second to tell. Without a measurement, the first loads would have to be made before it is
// known whether they are worthwhile, and memory would be taken for a disk.
func (s *Store) MeasureReads(tell func(root string, perSecond float64, memory bool)) {
	for _, r := range s.ours() {
		switch {
		case r.cfg.Volatile:
			s.work.Go(func() { tell(r.Path, memorySpeed(), true) })
		case !r.cfg.NoDirectory: // requests to a bucket cost money
			s.work.Go(func() {
				for _, event := range []<-chan struct{}{r.scanned, r.some} {
					select {
					case <-s.run.Done():
						return
					case <-event:
					}
					if speed := r.readSpeed(s.run); speed > 0 {
						tell(r.Path, speed, false)
						return
					}
				}
			})
		}
	}
}

// memorySpeed measures the copy speed of one thread, which is the least speed of a load from memory. It takes the fastest of
// several runs: the first run allocates the pages, and other work may share the core.
func memorySpeed() (best float64) {
	from, to := make([]byte, memoryPart), make([]byte, memoryPart)
	for range memoryCopies {
		start := time.Now()
		copy(to, from)
		best = max(best, memoryPart/max(time.Since(start), time.Microsecond).Seconds())
	}
	return best
}

// readSpeed reads some pieces and returns the speed in bytes a second. It returns 0 if there are no pieces or none can be read.
// It ends when a load begins, since the load measures the speed as well.
func (r *root) readSpeed(ctx context.Context) float64 {
	names := r.somePieces(speedFiles)
	if len(names) == 0 {
		return 0
	}
	buffers, err := staging.NewSlots(min(len(names), speedReaders), speedPart)
	if err != nil {
		return 0
	}
	var readers sync.WaitGroup
	var next, all, late atomic.Int64
	start := time.Now()
	for range min(len(names), speedReaders) {
		readers.Go(func() {
			slot, err := buffers.Acquire(ctx)
			if err != nil {
				return
			}
			defer slot.Release()
			for i := next.Add(1) - 1; i < int64(len(names)) && time.Since(start) < speedTime && !r.store.loads.UnderWay(); i = next.Add(1) - 1 {
				r.readFor(ctx, names[i], slot.Bytes(), func(n int) (more bool) {
					took := time.Since(start)
					all.Add(int64(n))
					if took > speedBurst {
						late.Add(int64(n))
					}
					return took < speedTime && !r.store.loads.UnderWay()
				})
			}
		})
	}
	readers.Wait()
	took := time.Since(start)
	_ = buffers.Close()
	if took > 2*speedBurst {
		return float64(late.Load()) / (took - speedBurst).Seconds()
	}
	return float64(all.Load()) / took.Seconds()
}

// readFor reads a file from its start in parts and calls read for each part, until the file ends or read returns false.
func (r *root) readFor(ctx context.Context, name string, part []byte, read func(n int) (more bool)) {
	f, err := staging.OpenDirect(r.FS, name, os.O_RDONLY, 0)
	if err != nil {
		return
	}
	defer f.Close()
	for off := int64(0); ctx.Err() == nil; {
		n, err := f.ReadAt(part, off)
		off += int64(n)
		if !read(n) || err != nil || n < len(part) {
			return
		}
	}
}

// somePieces returns the files of some entries, at most the given number.
func (r *root) somePieces(most int) (names []string) {
	r.Lock()
	defer r.Unlock()
	for slot := uint32(0); slot < r.Index.High() && len(names) < most; slot++ {
		if name := r.pieceOf(slot); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// pieceOf returns the file of one piece of an entry, or the empty string if the slot has none. The lock must be held.
func (r *root) pieceOf(slot uint32) string {
	pieces := r.Index.Pieces(slot)
	if e := r.Index.At(slot); pieces == 0 || !e.Is(index.Live) || e.Any(index.Evicting|index.Detached) {
		return ""
	}
	v := entries.Eviction{Class: r.ClassOf(slot), Key: r.Index.Key(slot), Names: r.Index.NamesOf(slot)}
	return r.victim(&v, uint32(bits.TrailingZeros64(pieces)))
}
