package transfer

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/staging"
)

// The direct route of a piece: its whole file is in a slot of device memory, between the pages and cuFile.
//
//	store:  pages --gather--> slot --checksum--> --cuFile--> payload of the temporary; then the CPU writes the head
//	load:   piece --cuFile--> slot --checksum, compared--> --scatter--> pages
//
// The GPU computes the checksums, and the CPU compares them before a byte of the payload reaches a page. An
// operation that fails on this route is staged within the same task: a load from its start, a store from the slot,
// since the client may have reused its pages. An operation that hangs is abandoned: a load is staged; a store fails,
// since its late write may still reach the file. The slot stays in use until the abandoned operation returns.

// readDirect loads a piece by the direct route. When done, err is the result. Otherwise the piece is to be staged;
// suspect says that the bytes were wrong, which may be the fault of the file or of the route: the attempt stays open
// until the staged load tells.
func (t *loadTask) readDirect(r attempt) (done, suspect bool, err error) {
	p, d := t.piece, r.choice.Direct
	size, expected := p.Size(), p.Expected()
	if size%4096 != 0 || size < expected.DataOffset || expected.Compressed && !hasCoder(t.spec.Memory) {
		r.skipped()
		return false, false, nil // left to the staged route to reject, or to the processor to decode
	}
	slot, err := d.Acquire(size, expected.DataOffset, len(expected.Plan.Extents()))
	if err != nil {
		r.full.Add(1)
		r.skipped()
		return false, false, nil
	}
	defer slot.Release()
	defer r.forget(p.File())
	if err := slot.Read(r.choice.Submit, int(p.File().Fd()), size); err != nil {
		return t.fallBack(r, err)
	}
	head, err := t.verifySlot(slot)
	switch {
	case errors.Is(err, errTable):
		r.skipped()
		return false, false, nil
	case errors.Is(err, ErrDevice):
		return t.fallBack(r, err)
	case errors.Is(err, ErrGeometry):
		r.skipped()
		return true, false, err
	case err != nil:
		return false, true, nil // the staged load tells whether file or route is wrong, see end
	}
	done, doubt := true, error(nil)
	if head.Compressed {
		done, doubt, err = t.decodeSlot(head, slot)
	} else {
		err = t.scatterSlot(head, slot)
	}
	switch {
	case err != nil:
		r.skipped()
		return true, false, err
	case doubt != nil:
		return false, true, nil
	case !done:
		r.skipped()
		return false, false, nil
	}
	r.succeeded(&r.loads, size)
	return true, false, nil
}

// fallBack decides what happens to a load whose direct operation failed.
func (t *loadTask) fallBack(r attempt, err error) (done, suspect bool, _ error) {
	if lost := r.choice.Direct.GPU().Err(); lost != nil {
		r.skipped()
		return true, false, deviceError(lost)
	}
	r.failed(&r.loadFallbacks, err, errors.Is(err, gds.ErrHung))
	return false, false, nil
}

// verifySlot checks the head of the file in a slot and the checksums of its payload.
func (t *loadTask) verifySlot(slot *gds.DirectSlot) (*store.Head, error) {
	head, err := t.piece.Verify(slot.Head)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	extents := head.Plan.Extents()
	if head.Table == nil || head.Compressed && !hasCoder(t.spec.Memory) || len(extents) > len(slot.Extents) {
		return nil, errTable
	}
	if !sameShape(head.Plan.Geometry(), t.spec.Memory.Geometry()) {
		return nil, ErrGeometry
	}
	if n := len(extents); n > 0 && endInFile(head, n-1) > t.piece.Size() {
		return nil, fmt.Errorf("%w: %s ends before its payload does", ErrDamaged, t.piece.File().Name())
	}
	if head.Compressed { // what is stored is verified before it is decoded
		return head, nil
	}
	if err := sumSlot(t.spec.Memory.(flaggedMemory).gpu, slot, extents, head.DataOffset); err != nil {
		return nil, deviceError(err)
	}
	for i, want := range head.Table {
		if slot.Sums[i] != want {
			return nil, fmt.Errorf("%w: extent %d of %s: %016x, the table says %016x", ErrDamaged, i,
				t.piece.File().Name(), slot.Sums[i], want)
		}
	}
	return head, nil
}

// scatterSlot scatters the slot's payload, inside the fence.
func (t *loadTask) scatterSlot(head *store.Head, slot *gds.DirectSlot) error {
	if !t.fence.enter() {
		return ErrCancelled
	}
	defer t.fence.leave()
	m := t.spec.Memory.(flaggedMemory)
	at, n := slot.Address+uint64(head.DataOffset), int(head.Plan.PayloadBytes())
	begin := func(t *gds.Thread) gds.Batch { return t.BeginDevice(gds.Scatter, at, n, m.flag) }
	return m.move(begin, &ExtentRange{Plan: head.Plan, Hi: len(head.Plan.Extents()),
		Blocks: t.spec.Chunks[t.index].Blocks})
}

// sumSlot computes the checksums of a payload at an offset of a slot, on the GPU.
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

// writeDirect stores a piece by the direct route. When done, err is the result. Otherwise nothing was written, and
// the piece is to be staged.
func (t *storeTask) writeDirect(r attempt, file staging.File) (done bool, err error) {
	put, m := t.chunk.Put, t.memory.(flaggedMemory)
	head, size, extents := put.DataOffset(), put.FileBytes(), put.Plan().Extents()
	slot, err := r.choice.Direct.Acquire(size, head, len(extents))
	if err != nil {
		r.full.Add(1)
		r.skipped()
		return false, nil
	}
	defer slot.Release()
	defer r.forget(file)
	putHead, table := put.Head, slot.Sums[:len(extents)]
	if put.Compresses() {
		scratch := t.queue.takeScratch(len(extents))
		defer t.queue.scratch.Put(scratch)
		stored := scratch.forStored()
		table = scratch.table
		if size, done, err = t.encodeSlot(m, slot, table, stored); err != nil || !done {
			r.skipped()
			return done, err
		}
		putHead = func(dst []byte, table []uint64) { t.size = put.HeadStored(dst, table, stored) }
	} else {
		if err := t.gatherSlot(m, slot); err != nil {
			r.skipped()
			return true, err
		}
		err = sumSlot(m.gpu, slot, extents, head)
	}
	if err == nil {
		if err = slot.Write(r.choice.Submit, int(file.Fd()), head, size); err == nil {
			putHead(slot.Head[:head], table)
			if _, err := file.WriteAt(slot.Head[:head], 0); err != nil {
				r.skipped()
				return true, err
			}
			r.succeeded(&r.stores, size)
			return true, nil
		}
	} else {
		table = nil
	}
	if lost := m.gpu.Err(); lost != nil {
		r.skipped()
		return true, deviceError(lost)
	}
	var hung *gds.HungError
	if errors.As(err, &hung) { // the late write may still reach the file, so it cannot become a piece
		r.failed(&r.storesHung, err, true)
		return true, err
	}
	r.failed(&r.storeFallbacks, err, errors.Is(err, gds.ErrHung))
	t.span.setRoute(byStaging)
	return true, t.writeFromSlot(m.gpu, slot, size, table, putHead, file)
}

// gatherSlot fills a slot's payload from the pages, inside the fence, and settles the chunk: its pages are not
// needed any more.
func (t *storeTask) gatherSlot(m flaggedMemory, slot *gds.DirectSlot) (err error) {
	put := t.chunk.Put
	plan, head, size := put.Plan(), put.DataOffset(), put.FileBytes()
	g := plan.Geometry()
	if size-head != g.PageBytes() { // there are gaps, or the last page is not full
		lost := m.gpu.Do(func(t *gds.Thread) { err = t.Fill(slot.Address+uint64(head), 0, size-head) })
		if err = errors.Join(lost, err); err != nil {
			return deviceError(err)
		}
	}
	if !t.fence.enter() {
		return ErrCancelled
	}
	defer t.fence.leave()
	begin := func(t *gds.Thread) gds.Batch {
		return t.BeginDevice(gds.Gather, slot.Address+uint64(head), int(plan.PayloadBytes()), m.flag)
	}
	if err := m.move(begin, &ExtentRange{Plan: plan, Hi: len(plan.Extents()), Blocks: t.chunk.Blocks}); err != nil {
		return err
	}
	t.fence.settle(t.index, nil, g.PageBytes())
	return nil
}

// writeFromSlot writes a slot's file of size bytes from the CPU, part by part through page-locked memory. Without a table
// it computes the checksums on the way.
func (t *storeTask) writeFromSlot(g *gds.GPU, slot *gds.DirectSlot, size int64, table []uint64,
	putHead func(dst []byte, table []uint64), file staging.File) (err error) {
	stage, err := t.queue.engine.slots.Acquire(t.queue.engine.ctx)
	if err != nil {
		return ErrClosed
	}
	defer func() { t.queue.engine.release(stage, err) }()
	plan, head := t.chunk.Put.Plan(), t.chunk.Put.DataOffset()
	buf := stage.Bytes()
	scratch := t.queue.takeScratch(len(plan.Extents()))
	defer t.queue.scratch.Put(scratch)
	extents := plan.Extents()
	for off, x := head, 0; off < size; {
		part := buf[:min(int64(len(buf)), size-off)]
		if err := readSlot(g, part, slot.Address+uint64(off)); err != nil {
			return err
		}
		n := int64(len(part))
		if table == nil { // whole extents only: the rest of one is read again with the next part
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
	putHead(slot.Head[:head], table)
	_, err = file.WriteAt(slot.Head[:head], 0)
	return err
}

func readSlot(g *gds.GPU, dst []byte, address uint64) (err error) {
	if lost := g.Do(func(t *gds.Thread) { err = t.Read(dst, address) }); lost != nil {
		err = lost
	}
	return deviceError(err)
}
