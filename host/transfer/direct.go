package transfer

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/staging"
)

// The direct route of a piece: its whole file stands in a slot of device memory, between the pages and cuFile.
//
//	store:  pages --gather--> slot --checksum--> --cuFile--> payload of the temporary, then its head by the processor
//	load:   piece --cuFile--> slot --checksum, compared--> --scatter--> pages
//
// Checksums are made on the GPU and compared by the processor, before a byte of the payload reaches a page. What fails on
// this route goes the staged one, in the same task: a load from its beginning, a store from the slot, since its pages may
// be the client's again. What hangs is given up: a load is staged, a store fails, since its late write may still reach the
// file. The slot is its own for as long as it lasts.

// loadDirect brings a piece by the direct route. done says that the chunk's fate is decided; else it is to be staged, and
// suspect says that the bytes were not what they should be, which may be the file's fault or the route's: the attempt goes on
// until that is known.
func (t *load) loadDirect(r attempt) (done, suspect bool, err error) {
	p, d := t.piece, r.choice.Direct
	size, expected := p.Size(), p.Expected()
	if size%4096 != 0 || size < expected.DataOffset {
		r.passed()
		return false, false, nil // for the staged route to judge
	}
	slot, err := d.Acquire(size, expected.DataOffset, len(expected.Plan.Extents()))
	if err != nil {
		r.full.Add(1)
		r.passed()
		return false, false, nil
	}
	defer slot.Release()
	defer r.forget(p.File())
	if err := slot.Read(r.choice.Submit, int(p.File().Fd()), size); err != nil {
		return t.stageInstead(r, err)
	}
	head, err := t.judge(slot)
	switch {
	case errors.Is(err, errTable):
		r.passed()
		return false, false, nil
	case errors.Is(err, ErrDevice):
		return t.stageInstead(r, err)
	case errors.Is(err, ErrGeometry):
		r.passed()
		return true, false, err
	case err != nil:
		return false, true, nil // who is to blame shows when it was staged: load.end says so to the route
	}
	err = t.deliver(head, slot)
	if err != nil {
		r.passed()
		return true, false, err
	}
	r.worked(&r.loads, size)
	return true, false, nil
}

// stageInstead decides what becomes of a load whose direct operation failed.
func (t *load) stageInstead(r attempt, err error) (done, suspect bool, _ error) {
	if lost := r.choice.Direct.GPU().Err(); lost != nil {
		r.passed()
		return true, false, deviceError(lost)
	}
	r.failed(&r.loadsAgain, err, errors.Is(err, gds.ErrHung))
	return false, false, nil
}

// judge checks the head of the file in a slot, and the checksums of its payload.
func (t *load) judge(slot *gds.DirectSlot) (*store.Head, error) {
	head, err := t.piece.Verify(slot.Head)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	extents := head.Plan.Extents()
	if head.Table == nil || len(extents) > len(slot.Extents) {
		return nil, errTable
	}
	if !sameShape(head.Plan.Geometry(), t.spec.Memory.Geometry()) {
		return nil, ErrGeometry
	}
	if head.DataOffset+head.Plan.PayloadBytes() > t.piece.Size() {
		return nil, fmt.Errorf("%w: %s ends before its payload does", ErrDamaged, t.piece.File().Name())
	}
	if err := sumSlot(t.spec.Memory.(guardedMemory).gpu, slot, extents, head.DataOffset); err != nil {
		return nil, deviceError(err)
	}
	for i, want := range head.Table {
		if slot.Sums[i] != want {
			return nil, fmt.Errorf("%w: extent %d of %s: %016x, the table says %016x", ErrDamaged, i, t.piece.File().Name(), slot.Sums[i], want)
		}
	}
	return head, nil
}

// deliver scatters the slot's payload, inside the fence.
func (t *load) deliver(head *store.Head, slot *gds.DirectSlot) error {
	if !t.job.enter() {
		return ErrCancelled
	}
	defer t.job.leave()
	m := t.spec.Memory.(guardedMemory)
	at, n := slot.Address+uint64(head.DataOffset), int(head.Plan.PayloadBytes())
	begin := func(t *gds.Thread) gds.Batch { return t.BeginDevice(gds.Scatter, at, n, m.flag) }
	return m.move(begin, head.Plan, 0, len(head.Plan.Extents()), t.spec.Chunks[t.index].Blocks, 0)
}

// sumSlot has the GPU sum a payload that starts at offset in a slot.
func sumSlot(g *gds.GPU, slot *gds.DirectSlot, extents []chunk.Extent, offset int64) (err error) {
	for i, e := range extents {
		slot.Extents[i] = gds.Extent{Offset: uint64(offset + e.Off), Len: uint32(e.Len)}
	}
	lost := g.Do(func(t *gds.Thread) { err = t.Sum(slot.Address, slot.Extents[:len(extents)], slot.Sums) })
	if lost != nil {
		return lost
	}
	return err
}

// writeDirect stores a piece by the direct route. It says whether the chunk's fate is decided; else nothing was done, and
// it is to be staged.
func (q *Queue) writeDirect(on *trip, r attempt, j *job, i int, m guardedMemory, c *StoreChunk, file staging.File) (done bool, err error) {
	plan, head, size := c.Put.Plan(), c.Put.DataOffset(), c.Put.FileBytes()
	extents := plan.Extents()
	slot, err := r.choice.Direct.Acquire(size, head, len(extents))
	if err != nil {
		r.full.Add(1)
		r.passed()
		return false, nil
	}
	defer slot.Release()
	defer r.forget(file)
	if err := q.gatherSlot(j, i, m, c, slot); err != nil {
		r.passed()
		return true, err
	}
	table := slot.Sums[:len(extents)]
	if err = sumSlot(m.gpu, slot, extents, head); err == nil {
		if err = slot.Write(r.choice.Submit, int(file.Fd()), head, size); err == nil {
			c.Put.Head(slot.Head[:head], table)
			if _, err := file.WriteAt(slot.Head[:head], 0); err != nil {
				r.passed()
				return true, err
			}
			r.worked(&r.stores, size)
			return true, nil
		}
	} else {
		table = nil
	}
	if lost := m.gpu.Err(); lost != nil {
		r.passed()
		return true, deviceError(lost)
	}
	var hung *gds.HungError
	if errors.As(err, &hung) { // it may still come to the file: that can be no piece any more
		r.failed(&r.storesHung, err, true)
		return true, err
	}
	r.failed(&r.storesAgain, err, errors.Is(err, gds.ErrHung))
	on.take(byStaging)
	return true, q.writeFromSlot(m.gpu, c, slot, table, file)
}

// gatherSlot fills a slot's payload from the pages, inside the fence, and settles the chunk: its pages are not needed any
// more, whatever becomes of the file.
func (q *Queue) gatherSlot(j *job, i int, m guardedMemory, c *StoreChunk, slot *gds.DirectSlot) (err error) {
	plan, head, size := c.Put.Plan(), c.Put.DataOffset(), c.Put.FileBytes()
	g := plan.Geometry()
	if size-head != g.PageBytes() { // gaps, or a last page that is not full
		lost := m.gpu.Do(func(t *gds.Thread) { err = t.Fill(slot.Address+uint64(head), 0, size-head) })
		if err = errors.Join(lost, err); err != nil {
			return deviceError(err)
		}
	}
	if !j.enter() {
		return ErrCancelled
	}
	defer j.leave()
	begin := func(t *gds.Thread) gds.Batch {
		return t.BeginDevice(gds.Gather, slot.Address+uint64(head), int(plan.PayloadBytes()), m.flag)
	}
	if err := m.move(begin, plan, 0, len(plan.Extents()), c.Blocks, 0); err != nil {
		return err
	}
	j.settle(i, nil, g.PageBytes())
	return nil
}

// writeFromSlot writes a slot's file by the processor, part by part through page-locked memory. Without a table it makes
// the checksums on the way.
func (q *Queue) writeFromSlot(g *gds.GPU, c *StoreChunk, slot *gds.DirectSlot, table []uint64, file staging.File) (err error) {
	stage, err := q.engine.slots.Acquire(q.engine.ctx)
	if err != nil {
		return ErrClosed
	}
	defer func() { q.engine.release(stage, err) }()
	plan, head, size := c.Put.Plan(), c.Put.DataOffset(), c.Put.FileBytes()
	buf := stage.Bytes()
	scratch := q.takeScratch(len(plan.Extents()))
	defer q.scratch.Put(scratch)
	extents := plan.Extents()
	for off, x := head, 0; off < size; {
		part := buf[:min(int64(len(buf)), size-off)]
		if err := readSlot(g, part, slot.Address+uint64(off)); err != nil {
			return err
		}
		n := int64(len(part))
		if table == nil { // whole extents only; what is left of one is read again with the next part
			first := x
			for x < len(extents) && head+end(extents[x]) <= off+n {
				x++
			}
			chunk.SumExtents(plan, first, x, part, off-head, scratch.table)
			if x < len(extents) {
				n = (head + extents[x].Off - off) &^ 4095
			}
		}
		if _, err := file.WriteAt(part[:n], off); err != nil {
			return err
		}
		off += n
	}
	if table == nil {
		table = scratch.table
	}
	c.Put.Head(slot.Head[:head], table)
	_, err = file.WriteAt(slot.Head[:head], 0)
	return err
}

func readSlot(g *gds.GPU, dst []byte, address uint64) (err error) {
	if lost := g.Do(func(t *gds.Thread) { err = t.Read(dst, address) }); lost != nil {
		err = lost
	}
	return deviceError(err)
}
