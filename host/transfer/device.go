package transfer

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/staging"
)

// DeviceRegion is the memory of one plane on a GPU: page i stands at Base+Offset+i*Stride of an allocation that is mapped
// here from Base on, Bytes long.
type DeviceRegion struct {
	Base   uint64
	Bytes  int64
	Offset int64
	Stride int64
	Blocks uint32
}

// DeviceMemory is Memory on a GPU, a client's allocations imported here. Its addresses never leave it: callers name pages
// by plane and block id, and ids are checked before any copy begins.
type DeviceMemory struct {
	gpu      *gds.GPU
	geometry chunk.Geometry
	regions  []DeviceRegion // by plane
	blocks   uint32
}

// NewDeviceMemory checks that regions, one per plane of g in its order, hold their pages.
func NewDeviceMemory(gpu *gds.GPU, g chunk.Geometry, regions []DeviceRegion) (*DeviceMemory, error) {
	shapes := make([]regionShape, len(regions))
	for i, r := range regions {
		shapes[i] = regionShape{size: r.Bytes, offset: r.Offset, stride: r.Stride, blocks: r.Blocks}
	}
	blocks, err := checkRegions(&g, shapes)
	if err != nil {
		return nil, err
	}
	return &DeviceMemory{gpu: gpu, geometry: g, regions: regions, blocks: blocks}, nil
}

// Geometry is the shape of a chunk in this memory.
func (m *DeviceMemory) Geometry() chunk.Geometry { return m.geometry }

// Blocks is how many blocks there are.
func (m *DeviceMemory) Blocks() uint32 { return m.blocks }

// Gather has the GPU bring the pages to dst, which is quick where dst is registered with it, and their sums: made on the way, in
// a window, or else by the processor of what has arrived.
func (m *DeviceMemory) Gather(p *chunk.Plan, lo, hi int, ids []uint32, dst []byte, base int64, table []uint64) error {
	return m.gather(nil, p, lo, hi, ids, dst, base, table)
}

func (m *DeviceMemory) gather(flag *gds.Flag, p *chunk.Plan, lo, hi int, ids []uint32, dst []byte, base int64, table []uint64) error {
	if done, err := m.gatherWindow(flag, p, lo, hi, ids, dst, base, table); done {
		return err
	}
	if err := m.move(pinned(flag, gds.Gather, dst), p, lo, hi, ids, base); err != nil {
		return err
	}
	chunk.SumExtents(p, lo, hi, dst, base, table)
	return nil
}

// Scatter verifies all of src, in a window of the GPU or else by the processor, before any of it reaches a page.
func (m *DeviceMemory) Scatter(p *chunk.Plan, lo, hi int, ids []uint32, src []byte, base int64, table []uint64) error {
	return m.scatter(nil, p, lo, hi, ids, src, base, table)
}

func (m *DeviceMemory) scatter(flag *gds.Flag, p *chunk.Plan, lo, hi int, ids []uint32, src []byte, base int64, table []uint64) error {
	verified := table == nil
	for range windowTries {
		done, suspect, err := m.scatterWindow(flag, p, lo, hi, ids, src, base, table)
		if done {
			return err
		}
		if suspect == nil {
			break
		}
		if err := chunk.VerifyExtents(p, lo, hi, src, base, table); err != nil {
			return err
		}
		verified = true
		m.gpu.WindowFailed(suspect) // the slot's bytes are right, the window's were not
	}
	if !verified {
		if err := chunk.VerifyExtents(p, lo, hi, src, base, table); err != nil {
			return err
		}
	}
	return m.move(pinned(flag, gds.Scatter, src), p, lo, hi, ids, base)
}

// pinned begins a batch between pages and a buffer of this process.
func pinned(flag *gds.Flag, dir gds.Direction, buffer []byte) func(*gds.Thread) gds.Batch {
	return func(t *gds.Thread) gds.Batch { return t.Begin(dir, buffer, flag) }
}

// move copies extents [lo, hi) on one of the GPU's threads, by the batch that begin makes of a buffer that holds the payload
// from offset base on. It returns when nothing is being copied any more.
func (m *DeviceMemory) move(begin func(*gds.Thread) gds.Batch, p *chunk.Plan, lo, hi int, ids []uint32, base int64) (err error) {
	if err := m.check(ids); err != nil {
		return err
	}
	lost := m.gpu.Do(func(t *gds.Thread) {
		b := begin(t)
		if err = m.add(&b, p, lo, hi, ids, base); err == nil {
			err = b.Wait()
		}
	})
	if lost != nil {
		err = lost
	}
	return deviceError(err)
}

// check refuses ids that are out of range.
func (m *DeviceMemory) check(ids []uint32) error {
	for _, id := range ids {
		if id != abi.None && id >= m.blocks {
			return fmt.Errorf("%w: id %d, the memory has %d blocks", ErrBlocks, id, m.blocks)
		}
	}
	return nil
}

// add puts the spans of extents [lo, hi) into a batch whose buffer holds the payload from offset base on.
func (m *DeviceMemory) add(b *gds.Batch, p *chunk.Plan, lo, hi int, ids []uint32, base int64) error {
	for c := p.Spans(lo, hi); c.Next(); {
		id := ids[c.Span.Block]
		if id == abi.None {
			continue
		}
		r := &m.regions[c.Span.Plane]
		page := r.Base + uint64(r.Offset+int64(id)*r.Stride+int64(c.Span.PageOff))
		if err := b.Add(page, int(c.Span.Off-base), int(c.Span.Len)); err != nil {
			return err
		}
	}
	return nil
}

// guardedMemory is device memory as one job sees it: under the flag that the job's cancel sets.
type guardedMemory struct {
	*DeviceMemory
	flag *gds.Flag
}

func (g guardedMemory) Gather(p *chunk.Plan, lo, hi int, ids []uint32, dst []byte, base int64, table []uint64) error {
	return g.gather(g.flag, p, lo, hi, ids, dst, base, table)
}

func (g guardedMemory) Scatter(p *chunk.Plan, lo, hi int, ids []uint32, src []byte, base int64, table []uint64) error {
	return g.scatter(g.flag, p, lo, hi, ids, src, base, table)
}

// guard lets the job's cancel stop what a GPU copies for it. The flag is given back when the fence closes.
func (j *job) guard(m Memory) Memory {
	d, ok := m.(*DeviceMemory)
	if !ok {
		return m
	}
	j.flag = d.gpu.NewFlag()
	return guardedMemory{d, j.flag}
}

// guarded is the load with its memory under the job's guard.
func (l *LoadJob) guarded(j *job) *LoadJob {
	own := *l
	own.Memory = j.guard(l.Memory)
	return &own
}

// guarded is the store with its memory under the job's guard.
func (s *StoreJob) guarded(j *job) *StoreJob {
	own := *s
	own.Memory = j.guard(s.Memory)
	return &own
}

// AddGPU registers the engine's staging slots with a GPU, which then copies to and from them at full speed. The GPU is to be
// closed after the engine. Without this, copies go through the driver's own buffers: slower, and as right.
func (e *Engine) AddGPU(g *gds.GPU) error {
	if err := e.slots.Register(g.Pinner()); err != nil {
		return fmt.Errorf("%w: page-lock the staging slots for %s: %w", ErrDevice, g.UUID, err)
	}
	return nil
}

// deviceError marks an error as the GPU's, so that no piece file is blamed for it.
func deviceError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, gds.ErrStopped):
		return ErrCancelled
	}
	return fmt.Errorf("%w: %w", ErrDevice, err)
}

// DefaultGPUWindow is a launch that keeps the bus busy for some time: on an H200 windows of 1 MiB moved a third less.
const DefaultGPUWindow = 4 << 20

// window is the part of a slot to use between a file and a memory; it holds at least the first head bytes of the file.
func (e *Engine) window(m Memory, slot []byte, f staging.File, head int64) []byte {
	if _, ok := m.(guardedMemory); ok && !f.Direct() {
		size := e.cfg.GPUWindow
		if size == 0 {
			size = DefaultGPUWindow
		}
		return slot[:min(int64(len(slot)), max(int64(size), head))]
	}
	return window(slot, f, head)
}
