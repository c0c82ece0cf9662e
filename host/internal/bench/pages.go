package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/kv"
)

// poison is the value of all bytes in pages of a GPU before a load.
const poison = 0xa5

// pages is the memory of a client, with one allocation for each plane.
type pages interface {
	// set fills a whole plane with its image, or with poison if image is nil.
	set(plane int, image []byte) error
	// get reads a plane into dst.
	get(plane int, dst []byte) error
	// copy moves pages to or from a slot.
	copy(dir gds.Direction, slot []byte, moves []move) error
	// Register shares the memory with the host of a session.
	Register(context.Context, *client.Session, drive.Heads) error
	Close() error
}

// move is one page and its place in a slot.
type move struct {
	plane, block, at int
}

// image returns the content of a client's planes before a store. Without content it returns only buffers of that size. The
// bytes follow from the client, the plane and the offset.
func image(g kv.Geometry, blocks int, content payload.Content) [][]byte {
	out := make([][]byte, len(g.Planes))
	_ = planes(g, func(i int) error {
		page := int(g.Planes[i].PageBytes)
		mem := make([]byte, blocks*page)
		for block := range blocks {
			if content != nil {
				content.Fill(mem[block*page:][:page], payload.Seed(&kv.Root, 0, kv.Plane{Layer: uint32(i)}, uint32(block)))
			}
		}
		out[i] = mem
		return nil
	})
	return out
}

// planes calls fn for each plane, as many at a time as there are processors.
func planes(g kv.Geometry, fn func(plane int) error) error {
	var work errgroup.Group
	work.SetLimit(runtime.GOMAXPROCS(0))
	for i := range g.Planes {
		work.Go(func() error { return fn(i) })
	}
	return work.Wait()
}

// hostPages is memory that this process shares with the host.
type hostPages struct{ *drive.Memory }

func (h hostPages) set(plane int, image []byte) error {
	if image == nil {
		drive.Poison(h.Planes[plane])
	}
	copy(h.Planes[plane], image)
	return nil
}

func (h hostPages) get(plane int, dst []byte) error {
	copy(dst, h.Planes[plane])
	return nil
}

func (h hostPages) copy(dir gds.Direction, slot []byte, moves []move) error {
	for _, m := range moves {
		if page := h.Page(m.plane, uint32(m.block)); dir == gds.Gather {
			copy(slot[m.at:], page)
		} else {
			copy(page, slot[m.at:])
		}
	}
	return nil
}

// devicePages is memory of a GPU.
type devicePages struct {
	gpu      *gds.GPU
	geometry kv.Geometry
	blocks   int // blocks of each plane
	planes   []*gds.Buffer
}

func newDevicePages(gpu *gds.GPU, g kv.Geometry, blocks int) (_ pages, err error) {
	d := &devicePages{gpu: gpu, geometry: g, blocks: blocks}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	for _, p := range g.Planes {
		n := int64(blocks) * int64(p.PageBytes)
		buf, err := gpu.Alloc(n)
		if err != nil {
			return nil, err
		}
		d.planes = append(d.planes, buf)
	}
	return d, nil
}

// on runs fn on one of the GPU's threads.
func (d *devicePages) on(fn func(*gds.Thread) error) (err error) {
	lost := d.gpu.Do(func(t *gds.Thread) { err = fn(t) })
	return errors.Join(lost, err)
}

func (d *devicePages) set(plane int, image []byte) error {
	b := d.planes[plane]
	return d.on(func(t *gds.Thread) error {
		if image != nil {
			return t.Write(b.Address, image)
		}
		return t.Fill(b.Address, poison, b.Size)
	})
}

func (d *devicePages) get(plane int, dst []byte) error {
	return d.on(func(t *gds.Thread) error { return t.Read(dst, d.planes[plane].Address) })
}

func (d *devicePages) copy(dir gds.Direction, slot []byte, moves []move) error {
	return d.on(func(t *gds.Thread) error {
		b := t.Begin(dir, slot, nil)
		for _, m := range moves {
			n := int(d.geometry.Planes[m.plane].PageBytes)
			if err := b.Add(d.planes[m.plane].Address+uint64(m.block*n), m.at, n); err != nil {
				return err
			}
		}
		return b.Wait()
	})
}

func (d *devicePages) Register(ctx context.Context, s *client.Session, h drive.Heads) error {
	regions, planes := h.Regions(d.geometry, drive.Regions(d.geometry, d.blocks))
	handles := make([][]byte, len(planes))
	for i, plane := range planes {
		var err error
		if handles[i], err = d.planes[plane].IPCHandle(); err != nil {
			return fmt.Errorf("bench: share device memory: %w", err)
		}
	}
	_, err := s.RegisterIPC(ctx, drive.GroupID, handles, regions)
	return err
}

func (d *devicePages) Close() error {
	var errs []error
	for _, p := range d.planes {
		errs = append(errs, p.Free())
	}
	return errors.Join(errs...)
}

// compare compares every loaded page with the page of the block from which it was stored. got holds buffers for all planes.
func compare(p pages, g kv.Geometry, image, got [][]byte, from, to []client.StoreChunk) error {
	return planes(g, func(plane int) error {
		got := got[plane]
		if err := p.get(plane, got); err != nil {
			return err
		}
		page := int(g.Planes[plane].PageBytes)
		for c := range from {
			for i := range from[c].Blocks {
				f, t := int(from[c].Blocks[i])*page, int(to[c].Blocks[i])*page
				if !bytes.Equal(got[t:t+page], image[plane][f:f+page]) {
					return fmt.Errorf("%w: plane %d, chunk %d, block %d", errBytes, plane, c, i)
				}
			}
		}
		return nil
	})
}
