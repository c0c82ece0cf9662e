package store

import (
	"context"
	"errors"
	"io"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/staging"
)

// How a root's reads are measured at the start: so many files at a time, and no longer than it takes to know.
const (
	speedReaders = 8
	speedPart    = 1 << 20
	speedTime    = 100 * time.Millisecond
)

// mostAwaited is how long work that would delay loads waits for them.
const mostAwaited = 100 * time.Millisecond

// AwaitLoads waits until no load is under way, but not for long.
func (s *Store) AwaitLoads() { _ = s.loads.Await(s.run, mostAwaited) }

// MeasureReads tells how many bytes per second are read from each directory that has pieces from an earlier life, in the background: without
// that the first loads would have to be made to know whether they pay.
func (s *Store) MeasureReads(tell func(root string, perSecond float64)) {
	for _, r := range s.ours() {
		if r.cfg.NoDirectory {
			continue // memory is empty, and requests to a bucket are paid for
		}
		s.work.Go(func() {
			select {
			case <-s.run.Done():
				return
			case <-r.scanned:
			}
			if speed := r.readSpeed(s.run); speed > 0 {
				tell(r.Path, speed)
			}
		})
	}
}

// readSpeed reads some pieces, and returns the bytes per second; 0 where there is none, or one cannot be read, which a load will judge.
func (r *root) readSpeed(ctx context.Context) float64 {
	names := r.somePieces(speedReaders)
	if len(names) == 0 {
		return 0
	}
	buffers, err := staging.NewSlots(len(names), speedPart)
	if err != nil {
		return 0
	}
	var readers sync.WaitGroup
	var bytes atomic.Int64
	start := time.Now()
	for _, name := range names {
		readers.Go(func() {
			if slot, err := buffers.Acquire(ctx); err == nil {
				defer slot.Release()
				bytes.Add(r.readFor(ctx, name, slot.Bytes(), start.Add(speedTime)))
			}
		})
	}
	readers.Wait()
	took := time.Since(start)
	_ = buffers.Close()
	return float64(bytes.Load()) / took.Seconds()
}

// readFor reads a file from its start until it ends or the time is over.
func (r *root) readFor(ctx context.Context, name string, part []byte, until time.Time) (read int64) {
	f, err := staging.OpenDirect(r.FS, name, os.O_RDONLY, 0)
	if err != nil {
		return 0
	}
	defer f.Close()
	for ctx.Err() == nil && time.Now().Before(until) {
		n, err := f.ReadAt(part, read)
		read += int64(n)
		if err != nil && !errors.Is(err, io.EOF) || n < len(part) {
			break
		}
	}
	return read
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
