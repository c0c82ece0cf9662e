package transfer

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// ProbeRequest names the direct route of a GPU and a root to be probed together.
type ProbeRequest struct {
	Direct *gds.DirectRoute
	FS     staging.FS
	Name   func() string // returns a new file name with each call; the directory exists
	Bytes  int64         // most bytes of all files while the probe runs
	Always bool          // choose the direct route if it works at all

	now func() time.Time // the clock of a test; nil: time.Now
}

// Speed is a route's throughput in bytes per second.
type Speed struct{ Write, Read float64 }

// cost is the time in seconds of a byte that is written once and read twice.
func (s Speed) cost() float64 { return 1/s.Write + 2/s.Read }

func (s Speed) String() string {
	return fmt.Sprintf("writes %.1f and reads %.1f GB/s", s.Write/1e9, s.Read/1e9)
}

const (
	probeFiles  = 4
	probeMost   = 16 << 20 // most bytes of one file
	probeRounds = 2        // measurements of a route, of which the fastest counts, since the first of a process is slow
)

// A route must save this share of the cost to be preferred. If cuFile itself copies through host memory, it uses as
// much CPU as the staged route, which is then preferred at equal speed.
const (
	compatMargin = 1.05
	realMargin   = 0.95
)

// Probe writes files by both routes, reads them back, compares them, and measures both. The choice names the route
// and the reason. The files are removed. The context is checked between operations.
func (e *Engine) Probe(ctx context.Context, q ProbeRequest) RouteChoice {
	p := &probe{ProbeRequest: q, engine: e, gpu: q.Direct.GPU()}
	defer p.close()
	if p.now == nil {
		p.now = time.Now
	}
	if err := p.open(); err != nil {
		return RouteChoice{Why: err.Error()}
	}
	direct, via, err := p.direct(ctx)
	if err != nil {
		return RouteChoice{Why: err.Error()}
	}
	out := RouteChoice{Direct: q.Direct, Always: q.Always, Via: via}
	staged, err := p.measure(ctx, p.stagedWrite, p.stagedRead)
	if err != nil {
		out.Why = fmt.Sprintf("direct %s (%s); staged failed: %v", direct, via, err)
		return out
	}
	out.Why = fmt.Sprintf("direct %s (%s), staged %s", direct, via, staged)
	margin := realMargin
	if via == gds.ByCompatibility {
		margin = compatMargin
	}
	if !q.Always && direct.cost()*margin > staged.cost() {
		out.Direct = nil
	}
	return out
}

// probe is a running probe: some files and slots, each file with different bytes.
type probe struct {
	ProbeRequest
	engine *Engine
	gpu    *gds.GPU
	size   int64
	slots  []*gds.DirectSlot
	files  []staging.File
	sums   [][]uint64
	seed   uint64
	dirty  bool // the slots do not hold their original bytes
}

func (p *probe) open() error {
	p.size = min(p.Bytes/probeFiles, probeMost) &^ (staging.Align - 1)
	if p.size < staging.Align {
		return fmt.Errorf("%w: no room for a probe", ErrProbe)
	}
	extents := int((p.size + gds.MaxExtent - 1) / gds.MaxExtent)
	p.seed = uint64(time.Now().UnixNano())
	for i := range probeFiles {
		slot, err := p.Direct.Acquire(p.size, staging.Align, extents)
		if err != nil {
			if i > 0 {
				break // fewer files are enough
			}
			return fmt.Errorf("%w: %w", ErrProbe, err)
		}
		p.slots = append(p.slots, slot)
		p.sums = append(p.sums, nil)
		if err := p.fill(i); err != nil {
			return fmt.Errorf("%w: %w", ErrProbe, err)
		}
		f, err := staging.OpenDirect(p.FS, p.Name(), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrProbe, err)
		}
		p.files = append(p.files, f)
	}
	return nil
}

// fill writes the file's bytes to its slot and records their checksums, computed by the CPU.
func (p *probe) fill(i int) error {
	slot, sums := p.slots[i], p.sums[i][:0]
	random := rand.NewPCG(p.seed, uint64(i))
	err := p.parts(func(part []byte, off int64) error {
		for k := 0; k < len(part); k += 8 {
			binary.LittleEndian.PutUint64(part[k:], random.Uint64())
		}
		for at := 0; at < len(part); at += gds.MaxExtent {
			sums = append(sums, kv.Sum(part[at:min(len(part), at+gds.MaxExtent)]))
		}
		return onGPU(p.gpu, func(t *gds.Thread) error { return t.Write(slot.Address+uint64(off), part) })
	})
	p.sums[i] = sums
	for x := range slot.Extents {
		at := int64(x) * gds.MaxExtent
		slot.Extents[x] = gds.Extent{Offset: uint64(at), Len: uint32(min(gds.MaxExtent, p.size-at))}
	}
	return err
}

// verify compares the bytes in a slot with the original ones.
func (p *probe) verify(i int) error {
	slot := p.slots[i]
	if err := onGPU(p.gpu, func(t *gds.Thread) error { return t.Sum(slot.Address, slot.Extents, slot.Sums) }); err != nil {
		return err
	}
	if !slices.Equal(slot.Sums[:len(p.sums[i])], p.sums[i]) {
		return fmt.Errorf("%w: bytes come back wrong", ErrProbe)
	}
	return nil
}

// direct measures the direct route, and names the path that cuFile took.
func (p *probe) direct(ctx context.Context) (speed Speed, via string, err error) {
	before, statErr := p.Direct.CuFile().Stats()
	speed, err = p.measure(ctx,
		func(i int) error { return p.slots[i].Write(int(p.files[i].Fd()), 0, p.size) },
		func(i int) error { return p.slots[i].Read(int(p.files[i].Fd()), p.size) })
	if err != nil {
		return speed, "", fmt.Errorf("%w: %w", ErrProbe, err)
	}
	after, err := p.Direct.CuFile().Stats()
	if statErr != nil || err != nil {
		return speed, "cuFile, route unknown", nil
	}
	return speed, after.Since(before).String(), nil
}

// measure times the writes of all files together, then their reads into cleared slots, and verifies the result.
func (p *probe) measure(ctx context.Context, write, read func(i int) error) (best Speed, err error) {
	total := float64(p.size) * float64(len(p.files))
	if p.dirty {
		if _, err := p.concurrently(ctx, p.fill); err != nil {
			return best, err
		}
		p.dirty = false
	}
	for range probeRounds {
		took, err := p.concurrently(ctx, write)
		if err != nil {
			return best, err
		}
		best.Write = max(best.Write, total/took.Seconds())
		p.dirty = true
		if _, err := p.concurrently(ctx, func(i int) error {
			return onGPU(p.gpu, func(t *gds.Thread) error { return t.Fill(p.slots[i].Address, 0xa5, p.size) })
		}); err != nil {
			return best, err
		}
		if took, err = p.concurrently(ctx, read); err != nil {
			return best, err
		}
		best.Read = max(best.Read, total/took.Seconds())
		if _, err := p.concurrently(ctx, p.verify); err != nil {
			return best, err
		}
		p.dirty = false
	}
	return best, nil
}

// concurrently runs fn for every file at once.
func (p *probe) concurrently(ctx context.Context, fn func(i int) error) (time.Duration, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	start := p.now()
	var work errgroup.Group
	for i := range p.files {
		work.Go(func() error { return fn(i) })
	}
	err := work.Wait()
	return max(p.now().Sub(start), time.Microsecond), err
}

func (p *probe) stagedWrite(i int) error {
	return p.parts(func(part []byte, off int64) error {
		at := p.slots[i].Address + uint64(off)
		if err := onGPU(p.gpu, func(t *gds.Thread) error { return t.Read(part, at) }); err != nil {
			return err
		}
		_, err := p.files[i].WriteAt(part, off)
		return err
	})
}

func (p *probe) stagedRead(i int) error {
	return p.parts(func(part []byte, off int64) error {
		if _, err := p.files[i].ReadAt(part, off); err != nil {
			return err
		}
		at := p.slots[i].Address + uint64(off)
		return onGPU(p.gpu, func(t *gds.Thread) error { return t.Write(at, part) })
	})
}

// parts calls fn for each slot-sized part of a file.
func (p *probe) parts(fn func(part []byte, off int64) error) error {
	return p.engine.withSlot(func(buf []byte) error {
		for off := int64(0); off < p.size; off += int64(len(buf)) {
			if err := fn(buf[:min(int64(len(buf)), p.size-off)], off); err != nil {
				return err
			}
		}
		return nil
	})
}

func (p *probe) close() {
	for _, f := range p.files {
		f.Close()
		_ = p.FS.Remove(f.Name())
	}
	for _, s := range p.slots {
		s.Release()
	}
}
