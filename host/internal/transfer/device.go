package transfer

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// DeviceRegion is the memory of one plane on a GPU, in an allocation of Bytes bytes that is mapped at Base.
type DeviceRegion struct {
	Base  uint64
	Bytes int64
	Grid
}

// DeviceMemory is [Memory] on a GPU: a client's allocations, imported here. Its addresses never leave it. Callers
// name pages by plane and block id, and ids are checked before any copy starts.
type DeviceMemory struct {
	shape
	gpu   *gds.GPU
	bases []uint64 // of the grids
}

// NewDeviceMemory checks that regions, for each unit one per plane of g in its order, hold their pages.
func NewDeviceMemory(gpu *gds.GPU, g kv.Geometry, regions []DeviceRegion) (*DeviceMemory, error) {
	m := &DeviceMemory{gpu: gpu}
	grids := make([]Grid, len(regions))
	for i, r := range regions {
		grids[i], m.bases = r.Grid, append(m.bases, r.Base)
	}
	var err error
	m.shape, err = newShape(g, grids, func(i int) int64 { return regions[i].Bytes })
	return m, err
}

// hostBatch starts a batch between pages and a buffer of this process.
func hostBatch(flag *gds.Flag, dir gds.Direction, buffer []byte) func(*gds.Thread) gds.Batch {
	return func(t *gds.Thread) gds.Batch { return t.Begin(dir, buffer, flag) }
}

// move copies a range on one of the GPU's threads, with the batch that begin starts on the range's buffer. When it
// returns, nothing is being copied any more.
func (m *DeviceMemory) move(begin func(*gds.Thread) gds.Batch, r *ExtentRange) error {
	if err := m.check(r.Blocks); err != nil {
		return err
	}
	return deviceError(onGPU(m.gpu, func(t *gds.Thread) error {
		b := begin(t)
		if err := m.add(&b, r); err != nil {
			return err
		}
		return b.Wait()
	}))
}

// onGPU runs fn with one of the GPU's threads for copies.
func onGPU(g *gds.GPU, fn func(*gds.Thread) error) (err error) {
	if lost := g.Do(func(t *gds.Thread) { err = fn(t) }); lost != nil {
		return lost
	}
	return err
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

// add adds the spans of a range to a batch on the range's buffer.
func (m *DeviceMemory) add(b *gds.Batch, r *ExtentRange) error {
	for c := m.spans(r, r.Lo, r.Hi); c.Next(); {
		region, at, wanted := m.find(r, &c.Span)
		if !wanted {
			continue
		}
		if err := b.Add(m.bases[region]+uint64(at), int(c.Span.Off-r.Base), int(c.Span.Len)); err != nil {
			return err
		}
	}
	return nil
}

// flaggedMemory is device memory as one job sees it: its copies stop when the job's cancel sets the flag.
type flaggedMemory struct {
	*DeviceMemory
	flag *gds.Flag
}

// flagged ties copies of device memory to the fence's stop flag, which is released when the fence closes.
func (f *fence) flagged(m Memory) Memory {
	d, ok := m.(*DeviceMemory)
	if !ok {
		return m
	}
	f.flag = d.gpu.NewFlag()
	return flaggedMemory{d, f.flag}
}

// AddGPU registers the engine's staging slots with a GPU, which then copies to and from them at full speed. Close
// the GPU after the engine. Without this, copies go through the driver's own buffers and are slower.
func (e *Engine) AddGPU(g *gds.GPU) error {
	if err := e.slots.Register(g.Pinner()); err != nil {
		return fmt.Errorf("%w: page-lock the staging slots for %s: %w", ErrDevice, g.UUID, err)
	}
	e.measureBus(g)
	return nil
}

// Register registers the engine's staging slots with others than GPUs. Close it after the engine, or once nothing uses them.
func (e *Engine) Register(p staging.Pinner) error { return e.slots.Register(p) }

// deviceError marks an error as the GPU's, so that no piece file is reported as damaged for it.
func deviceError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, gds.ErrStopped):
		return ErrCancelled
	}
	return fmt.Errorf("%w: %w", ErrDevice, err)
}

// DefaultGPUCopyBytes keeps the bus busy for the length of a launch: on an H200, copies of 1 MiB moved a third less.
const DefaultGPUCopyBytes = 4 << 20

// ioBuffer is the part of a slot to use between a file and a memory; it holds at least the first head bytes of the
// file.
func (e *Engine) ioBuffer(m Memory, slot []byte, f staging.File, head int64) []byte {
	if f.Direct() {
		return slot
	}
	return slot[:min(int64(len(slot)), max(e.memoryPart(m), head))]
}

// gpuCopyBytes is how much is copied at a time to or from a GPU unless the file is read or written past the page cache.
func (e *Engine) gpuCopyBytes() int {
	return min(cmp.Or(e.cfg.GPUCopyBytes, DefaultGPUCopyBytes), e.cfg.SlotBytes)
}

// cachedIOBytes is how much of a file that lives in the page cache is moved at a time: little enough that the second
// copy finds the bytes of the first in the CPU's cache. A device, by contrast, wants large requests.
const cachedIOBytes = 1 << 20

// memoryPart is how much of a file that is in this host's memory, or cached there, is moved at a time.
func (e *Engine) memoryPart(m Memory) int64 {
	if _, ok := m.(flaggedMemory); ok {
		return int64(e.gpuCopyBytes())
	}
	return cachedIOBytes
}

// hasCoder reports whether the memory is of a GPU that has a coder.
func hasCoder(m Memory) bool {
	f, ok := m.(flaggedMemory)
	return ok && f.gpu.FitsCoder(1, 1)
}

// observe enters a plain way between slot and pages that began then, if it is a GPU's.
func observe(b *staging.Bandwidth, m Memory, extents []kv.Extent, began time.Time) {
	if _, ok := m.(flaggedMemory); ok {
		b.Observe(pageBytes(extents), time.Since(began))
	}
}

func pageBytes(extents []kv.Extent) (sum int64) {
	for _, e := range extents {
		sum += int64(e.Len)
	}
	return sum
}
