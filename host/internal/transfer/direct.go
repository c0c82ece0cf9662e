package transfer

import (
	"errors"
	"slices"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// directRoute moves pieces between a GPU and a root by cuFile, if cuFile was chosen for the two. The whole file passes
// through a slot of device memory between the pages and cuFile.
//
//	store:  pages --gather--> slot --checksum--> --cuFile--> payload of the temporary; then the CPU writes the head
//	load:   piece --cuFile--> slot --checksum, compared--> --scatter--> pages
//
// The GPU computes the checksums, and the CPU compares them before a byte of the payload reaches a page. An
// operation that fails on this route is staged within the same task: a load from its start, a store from the slot,
// since the client may have reused its pages. An operation that hangs is abandoned: a load is staged; a store fails,
// since its late write may still reach the file. The slot stays in use until the abandoned operation returns.
type directRoute struct{ *routeChoices }

// attempt returns an attempt between a memory and a root. It is the zero attempt if cuFile is not chosen or is
// suspended.
func (d directRoute) attempt(m Memory, root string) attempt {
	f, ok := m.(*DeviceMemory)
	if !ok {
		return attempt{}
	}
	d.mu.RLock()
	r := d.chosen[routeKey{f.gpu, root}]
	d.mu.RUnlock()
	if r == nil || r.choice.Direct == nil {
		return attempt{}
	}
	return r.attempt()
}

// load delivers a whole piece. It refuses layer-wise loads, which read a file in parts, and pieces with wrong bytes:
// the staged route then shows whether the file is damaged.
func (d directRoute) load(l *loading) error {
	if l.parts != nil {
		return errNotHere
	}
	a := d.attempt(l.memory, l.piece.Root())
	if a.gpuRoute == nil {
		return errNotHere
	}
	l.span.setRoute(byCuFile)
	p, size, expected := l.piece, l.piece.Size(), l.piece.Expected()
	if size%4096 != 0 || size < expected.DataOffset || expected.Compressed && !hasCoder(l.memory) {
		return a.skipped(errNotHere) // the staged route rejects it, or the processor decodes it
	}
	slot, err := a.acquire(size, expected.DataOffset, expected.Plan)
	if err != nil {
		return err
	}
	defer slot.Release()
	defer a.forget(p.File())
	if err := slot.Read(int(p.File().Fd()), size); err != nil {
		return a.loadFailed(err)
	}
	head, doubt, err := l.verifySlot(slot)
	if errors.Is(err, ErrDevice) {
		return a.loadFailed(err)
	}
	switch {
	case err != nil || doubt != nil:
	case head.Compressed:
		doubt, err = l.decodeSlot(head, slot)
	default:
		err = l.scatterSlot(head, slot)
	}
	switch {
	case doubt != nil:
		l.verdict = a.judge
		return errNotHere
	case err != nil:
		return a.skipped(err)
	}
	a.succeeded(&a.loads, size)
	l.head, l.done = head, len(head.Plan.Extents())
	return nil
}

// acquire takes a slot for a file, or refuses the piece.
func (a attempt) acquire(size, head int64, plan *kv.Plan) (*gds.DirectSlot, error) {
	slot, err := a.choice.Direct.Acquire(size, head, len(plan.Extents()))
	if err != nil {
		a.full.Add(1)
		return nil, a.skipped(errNotHere)
	}
	return slot, nil
}

// judge ends an attempt that delivered wrong bytes. err is the outcome of the same load by another route.
func (a attempt) judge(err error) {
	if err == nil { // the file was right
		a.failed(&a.mismatched, ErrDamaged, true)
	} else {
		_ = a.skipped(err)
	}
}

// loadFailed ends an attempt for an operation that failed, and refuses the piece unless the GPU is lost.
func (a attempt) loadFailed(err error) error {
	if lost := a.choice.Direct.GPU().Err(); lost != nil {
		return a.skipped(deviceError(lost))
	}
	a.failed(&a.loadFallbacks, err, errors.Is(err, gds.ErrHung))
	return errNotHere
}

// verifySlot checks the head of the file in a slot and the checksums of its payload; those of a compressed piece are
// verified by the decoder. doubt says which bytes are wrong; it is nil if none are.
func (l *loading) verifySlot(slot *gds.DirectSlot) (head *store.Head, doubt, err error) {
	head, doubt = l.piece.Verify(slot.Head)
	if doubt != nil {
		return nil, doubt, nil
	}
	extents := head.Plan.Extents()
	if head.Table == nil || head.Compressed && !hasCoder(l.memory) || len(extents) > len(slot.Extents) {
		return nil, nil, errNotHere // the slot was sized for another plan
	}
	if !head.Plan.Geometry().Equal(l.memory.Geometry()) {
		return nil, nil, ErrGeometry
	}
	if n := len(extents); n > 0 && endInFile(head, n-1) > l.piece.Size() {
		return nil, ErrDamaged, nil
	}
	if head.Compressed {
		return head, nil, nil
	}
	sums, err := sumSlot(l.memory.(*DeviceMemory).gpu, slot, extents, head.DataOffset)
	if err != nil {
		return nil, nil, deviceError(err)
	}
	if !slices.Equal(sums, head.Table) {
		return nil, kv.ErrChecksum, nil
	}
	return head, nil, nil
}

// scatterSlot scatters the slot's payload, inside the fence.
func (l *loading) scatterSlot(head *store.Head, slot *gds.DirectSlot) error {
	if !l.fence.enter() {
		return ErrCancelled
	}
	defer l.fence.leave()
	m := l.memory.(*DeviceMemory)
	at, n := slot.Address+uint64(head.DataOffset), int(head.Plan.PayloadBytes())
	begin := func(t *gds.Thread) gds.Batch { return t.BeginDevice(gds.Scatter, at, n, m.flag) }
	return m.move(begin, &ExtentRange{Plan: head.Plan, Hi: len(head.Plan.Extents()), Unit: l.unit, Blocks: l.ids})
}

// sumSlot computes the checksums of a payload at an offset of a slot, on the GPU.
func sumSlot(g *gds.GPU, slot *gds.DirectSlot, extents []kv.Extent, offset int64) ([]uint64, error) {
	for i, e := range extents {
		slot.Extents[i] = gds.Extent{Offset: uint64(offset + e.Off), Len: uint32(e.Len)}
	}
	n := len(extents)
	err := onGPU(g, func(t *gds.Thread) error { return t.Sum(slot.Address, slot.Extents[:n], slot.Sums) })
	if err != nil {
		return nil, err
	}
	return slot.Sums[:n], nil
}

func (d directRoute) store(t *storeTask, file staging.File) error {
	put := t.chunk.Put
	if put.Compresses() && !hasCoder(t.memory) {
		return errNotHere
	}
	a := d.attempt(t.memory, put.Root())
	if a.gpuRoute == nil {
		return errNotHere
	}
	t.span.setRoute(byCuFile)
	slot, err := a.acquire(put.FileBytes(), put.DataOffset(), put.Plan())
	if err != nil {
		return err
	}
	defer slot.Release()
	defer a.forget(file)
	scratch := t.queue.takeScratch(len(put.Plan().Extents()))
	defer t.queue.scratch.Put(scratch)
	w := &slotWriter{pieceWriter: pieceWriter{task: t, plan: put.Plan(), file: file}, memory: t.memory.(*DeviceMemory),
		slot: slot, scratch: scratch}
	if err := w.fill(); err != nil {
		return a.skipped(err)
	}
	if w.table == nil {
		w.table, err = sumSlot(w.memory.gpu, slot, put.Plan().Extents(), put.DataOffset())
	}
	if err == nil {
		err = slot.Write(int(file.Fd()), put.DataOffset(), w.size)
	}
	if err == nil {
		if err := w.writeHead(); err != nil {
			return a.skipped(err)
		}
		a.succeeded(&a.stores, w.size)
		return nil
	}
	if lost := w.memory.gpu.Err(); lost != nil {
		return a.skipped(deviceError(lost))
	}
	if _, hung := errors.AsType[*gds.HungError](err); hung { // the late write may still reach the file, so it cannot become a piece
		a.failed(&a.storesHung, err, true)
		return err
	}
	a.failed(&a.storeFallbacks, err, errors.Is(err, gds.ErrHung))
	t.span.setRoute(byStaging)
	return t.queue.engine.withSlot(w.stage)
}

// slotWriter stores a piece from a slot of device memory. Its table is nil until the checksums are computed.
type slotWriter struct {
	pieceWriter
	memory  *DeviceMemory
	slot    *gds.DirectSlot
	scratch *scratch
	size    int64                // bytes of the file
	stored  []pieceformat.Stored // nil: the piece is not compressed
}

// fill gathers the pages into the slot in the file's order, and settles the chunk: its pages are not needed any more.
func (w *slotWriter) fill() error {
	if w.task.chunk.Put.Compresses() {
		return w.fillEncoded()
	}
	put, g := w.task.chunk.Put, w.plan.Geometry()
	w.size = put.FileBytes()
	if room := w.size - put.DataOffset(); room != g.PageBytes() { // there are gaps, or the last page is not full
		if err := w.clear(room); err != nil {
			return deviceError(err)
		}
	}
	begin := func(t *gds.Thread) gds.Batch {
		at := w.slot.Address + uint64(put.DataOffset())
		return t.BeginDevice(gds.Gather, at, int(w.plan.PayloadBytes()), w.memory.flag)
	}
	_, err := w.fenced(0, len(w.plan.Extents()), 0,
		func(r ExtentRange) (bool, error) { return true, w.memory.move(begin, &r) })
	return err
}

func (w *slotWriter) writeHead() error {
	put := w.task.chunk.Put
	head := w.slot.Head[:put.DataOffset()]
	if w.stored != nil {
		w.task.size = put.HeadStored(head, w.table, w.stored)
	} else {
		put.Head(head, w.table)
	}
	_, err := w.file.WriteAt(head, 0)
	return err
}

// stage writes the slot's file from the CPU, part by part through page-locked memory. Without a table it computes the
// checksums on the way.
func (w *slotWriter) stage(buf []byte) error {
	head, extents := w.task.chunk.Put.DataOffset(), w.plan.Extents()
	for off, x := head, 0; off < w.size; {
		part := buf[:min(int64(len(buf)), w.size-off)]
		read := func(t *gds.Thread) error { return t.Read(part, w.slot.Address+uint64(off)) }
		if err := onGPU(w.memory.gpu, read); err != nil {
			return deviceError(err)
		}
		n := int64(len(part))
		if w.table == nil { // whole extents only: a partial extent is read again with the next part
			first := x
			for x < len(extents) && head+end(extents[x]) <= off+n {
				x++
			}
			kv.SumExtents(w.plan, first, x, part, off-head, w.scratch.table)
			if x < len(extents) {
				n = (head + extents[x].Off - off) &^ 4095
			}
		}
		if _, err := w.file.WriteAt(part[:n], off); err != nil {
			return err
		}
		off += n
	}
	if w.table == nil {
		w.table = w.scratch.table
	}
	return w.writeHead()
}

// clear zeroes n bytes of the slot's payload.
func (w *slotWriter) clear(n int64) error {
	at := w.slot.Address + uint64(w.task.chunk.Put.DataOffset())
	return onGPU(w.memory.gpu, func(t *gds.Thread) error { return t.Fill(at, 0, n) })
}

// The direct route of a compressed piece: the slot holds the stored file, and the GPU codes between the slot and a
// window.
//
//	store:  pages --gather--> window --checksums, encode--> slot --checksums--> --cuFile--> payload of the temporary
//	load:   piece --cuFile--> slot --checksums, decode--> window --checksums, then scatter--> pages

// fillEncoded is fill for a compressed piece. It can refuse the piece only while the pages are still needed.
func (w *slotWriter) fillEncoded() error {
	put := w.task.chunk.Put
	extents, most, head := w.plan.Extents(), put.FileBytes(), put.DataOffset()
	if err := w.clear(most - head); err != nil {
		return refused(w.memory.coderFailed(nil, err))
	}
	w.table, w.stored = w.scratch.table, w.scratch.forStored()
	var took time.Duration
	size := head
	for lo := 0; lo < len(extents); {
		hi, base := coded(w.memory, extents, lo, len(extents), most)
		if hi == lo {
			return errNotHere
		}
		n, part, err := w.encode(lo, hi, base, image{device: w.slot.Address + uint64(size)}, w.stored)
		if err != nil {
			return err
		}
		lo, size, took = hi, size+int64(n), took+part
	}
	put.Encoded(size-head, took)
	w.size = head + pieceformat.Padded(size-head)
	return nil
}

// decodeSlot decodes and delivers the piece in a slot. doubt says which bytes the GPU found wrong; it is nil if none
// are.
func (l *loading) decodeSlot(head *store.Head, slot *gds.DirectSlot) (doubt, err error) {
	in := image{device: slot.Address + uint64(head.DataOffset)}
	done := true
	for lo, hi := 0, len(head.Plan.Extents()); lo < hi && done && err == nil; {
		lo, done, doubt, err = l.byGPU(head, lo, hi, in, 0)
	}
	return doubt, refused(done, err)
}
