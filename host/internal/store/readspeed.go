package store

import (
	"context"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/staging"
)

// How a root's reads are measured: so many files at a time, and no longer than it takes to know. Disks of virtual machines give what they
// have saved up while nothing was read at many times their speed: the first part of the time does not count.
const (
	speedReaders = 8
	speedFiles   = 4 * speedReaders
	speedPart    = 1 << 20
	speedBurst   = 400 * time.Millisecond
	speedTime    = time.Second
	memoryPart   = 8 << 20
	memoryCopies = 8
)

// mostAwaited is how long work that would delay loads waits for them.
const mostAwaited = 100 * time.Millisecond

// AwaitLoads waits until no load is under way, but not for long.
func (s *Store) AwaitLoads() { _ = s.loads.Await(s.run, mostAwaited) }

// MeasureReads tells how many bytes per second are read from memory, and from each directory as soon as it has some pieces, in the
// background. Without that the first loads would have to be made to know whether they pay, and a load from memory would be taken for
// one from a disk.
func (s *Store) MeasureReads(tell func(root string, perSecond float64, memory bool)) {
	for _, r := range s.ours() {
		switch {
		case r.cfg.Volatile:
			s.work.Go(func() { tell(r.Path, memorySpeed(), true) })
		case !r.cfg.NoDirectory: // requests to a bucket are paid for
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

// memorySpeed is the speed of one thread's copy, the least that a load from memory has. The fastest of some counts: in the first the pages come,
// and others may share the core.
func memorySpeed() (best float64) {
	from, to := make([]byte, memoryPart), make([]byte, memoryPart)
	for range memoryCopies {
		start := time.Now()
		copy(to, from)
		best = max(best, memoryPart/max(time.Since(start), time.Microsecond).Seconds())
	}
	return best
}

// readSpeed reads some pieces, and returns the bytes per second; 0 where there is none, or none can be read, which a load will judge. It
// ends when a load begins, which tells the speed, too.
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

// readFor reads a file from its start until it ends or read, which is told of each part, has had enough.
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

// somePieces are the files of so many entries.
func (r *root) somePieces(most int) (names []string) {
	r.Lock()
	defer r.Unlock()
	for slot := uint32(0); slot < r.Index.High() && len(names) < most; slot++ {
		e := r.Index.At(slot)
		if !e.Is(index.Live|index.Complete) || e.Any(index.Evicting|index.Detached) || r.Index.Pieces(slot) == 0 {
			continue
		}
		rank, name := uint32(bits.TrailingZeros64(r.Index.Pieces(slot))), ""
		if e.Is(index.Named) {
			name = r.Index.NameOf(slot, rank)
		}
		key := r.Index.Key(slot)
		names = append(names, r.path(name, r.ClassOf(slot), &key, rank))
	}
	return names
}
