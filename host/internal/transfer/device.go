package transfer

import (
	"errors"
	"fmt"
	"time"

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

// DeviceMemory is [Memory] on a GPU: imported allocations of a client. Callers name pages by plane and block id, never
// by address, and check ids by [CheckBlocks] before any copy starts.
type DeviceMemory struct {
	shape
	gpu   *gds.GPU
	bases []uint64  // addresses, by grid
	flag  *gds.Flag // stops the copies of one job; nil for the memory of a session
}

// NewDeviceMemory checks that the regions hold their pages. There is one region per plane of g, in its order, for each
// unit.
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
func (m *DeviceMemory) hostBatch(dir gds.Direction, buffer []byte) func(*gds.Thread) gds.Batch {
	return func(t *gds.Thread) gds.Batch { return t.Begin(dir, buffer, m.flag) }
}

// move copies a range on one of the GPU's threads, with the batch that begin starts on the range's buffer. When it
// returns, nothing is being copied any more.
func (m *DeviceMemory) move(begin func(*gds.Thread) gds.Batch, r *ExtentRange) error {
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

// add adds the spans of a range to a batch on the range's buffer.
func (m *DeviceMemory) add(b *gds.Batch, r *ExtentRange) error {
	for c := m.spans(r, r.Lo, r.Hi); c.Next(); {
		region, at, wanted := m.find(r, &c.Span)
		if !wanted {
			continue
		}
		page, stride := m.rows(region)
		from, off, left := m.bases[region]+uint64(at), int(c.Span.Off-r.Base), int(c.Span.Len)
		if page > 0 { // the rest of a page that another extent begins is a piece of its own
			if in := c.Span.PageOff % page; in > 0 && left > int(page-in) {
				n := int(page - in)
				if err := b.AddRows(from, off, n, page, uint64(stride)); err != nil {
					return err
				}
				from, off, left = from+uint64(stride)-uint64(in), off+n, left-n
			}
		}
		if err := b.AddRows(from, off, left, page, uint64(stride)); err != nil {
			return err
		}
	}
	return nil
}

// flagged ties copies of device memory to the fence's stop flag, which is released when the fence closes.
func (f *fence) flagged(m Memory) Memory {
	d, ok := m.(*DeviceMemory)
	if !ok {
		return m
	}
	job := *d
	f.flag = d.gpu.NewFlag()
	job.flag = f.flag
	return &job
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

// A bus is measured by copies as large as those of a load. The fastest counts, since the first copy includes setup.
const (
	busBytes  = gpuCopyBytes
	busCopies = 4
)

// measureBus records the speed of a GPU's bus. A GPU without room for the copies is expected to be as slow as memory is
// for a processor.
func (e *Engine) measureBus(g *gds.GPU) {
	slot, ok := e.slots.TryAcquire()
	if !ok {
		return
	}
	defer slot.Release()
	from := slot.Bytes()[:min(busBytes, e.cfg.SlotBytes)]
	to, err := g.Alloc(int64(len(from)))
	if err != nil {
		e.cfg.Log.Debug("the bus is not measured", "gpu", g.UUID.String(), "error", err)
		return
	}
	best := 0.0
	err = onGPU(g, func(t *gds.Thread) error {
		for range busCopies {
			began := time.Now()
			if err := t.Write(to.Address, from); err != nil {
				return err
			}
			best = max(best, float64(len(from))/max(time.Since(began), time.Microsecond).Seconds())
		}
		return nil
	})
	if err = errors.Join(err, to.Free()); err != nil {
		e.cfg.Log.Debug("the bus is not measured", "gpu", g.UUID.String(), "error", err)
		return
	}
	e.trafficMu.Lock()
	defer e.trafficMu.Unlock()
	e.buses[g.UUID.String()] = best
}

// Register registers the engine's staging slots with a pinner other than a GPU. Close the pinner after the engine.
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

// gpuCopyBytes keeps the bus busy for the length of a launch: on an H200, copies of 1 MiB moved a third less.
const gpuCopyBytes = 4 << 20

// ioBuffer returns the part of a slot to use between a file and a memory. It has room for at least the first head bytes
// of the file.
func (e *Engine) ioBuffer(m Memory, slot []byte, f staging.File, head int64) []byte {
	if f.Direct() {
		return slot
	}
	return slot[:min(int64(len(slot)), max(e.memoryPart(m), head))]
}

// cachedIOBytes is the size of one transfer of a file in the page cache: small enough that the second copy finds the
// bytes of the first in the CPU's cache. A device works best with large requests.
const cachedIOBytes = 1 << 20

// memoryPart returns the size of one transfer of a file in memory or in the page cache.
func (e *Engine) memoryPart(m Memory) int64 {
	if _, ok := m.(*DeviceMemory); ok {
		return int64(min(gpuCopyBytes, e.cfg.SlotBytes))
	}
	return cachedIOBytes
}

// hasCoder reports whether the memory is of a GPU that has a coder.
func hasCoder(m Memory) bool {
	f, ok := m.(*DeviceMemory)
	return ok && f.gpu.FitsCoder(1, 1)
}

// observe enters the time since began of a plain copy between slot and pages, if the pages are a GPU's.
func observe(b *staging.Bandwidth, m Memory, extents []kv.Extent, began time.Time) {
	if _, ok := m.(*DeviceMemory); ok {
		b.Observe(pageBytes(extents), time.Since(began))
	}
}

func pageBytes(extents []kv.Extent) (sum int64) {
	for _, e := range extents {
		sum += int64(e.Len)
	}
	return sum
}
