package transfer

import (
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// The direct route of a compressed piece: the slot has its file as it is stored, and the GPU codes between the slot and a
// window.
//
//	store:  pages --gather--> window --checksums, encode--> slot --checksums--> --cuFile--> payload of the temporary
//	load:   piece --cuFile--> slot --checksums, decode--> window --checksums, then scatter--> pages

// encodeSlot fills a slot's payload with what is stored of the pages, and settles the chunk when their last are read. When
// done, err is the result, and the file ends at size. Otherwise the pages are still needed.
func (t *storeTask) encodeSlot(
	m flaggedMemory, slot *gds.DirectSlot, table []uint64, stored []pieceformat.Stored,
) (size int64, done bool, err error) {
	put := t.chunk.Put
	w := &pieceWriter{task: t, plan: put.Plan(), table: table}
	extents, most, head := w.plan.Extents(), put.FileBytes(), put.DataOffset()
	lost := m.gpu.Do(func(t *gds.Thread) { err = t.Fill(slot.Address+uint64(head), 0, most-head) })
	if lost != nil || err != nil {
		done, err = m.coderFailed(lost, err)
		return 0, done, err
	}
	var took time.Duration
	size = head
	for lo := 0; lo < len(extents); {
		hi, base := coded(m, extents, lo, len(extents), most)
		if hi == lo {
			return 0, false, nil
		}
		done, err = w.fenced(lo, hi, base, func(r ExtentRange) (done bool, err error) {
			n, part, done, err := m.encode(&r, image{device: slot.Address + uint64(size)}, stored)
			size, took = size+int64(n), took+beyond(&t.queue.engine.gathers, pageBytes(r.extents()), part)
			return done, err
		})
		if err != nil || !done {
			return 0, done, err
		}
		lo = hi
	}
	put.Encoded(size-head, took)
	return head + pieceformat.Padded(size-head), true, nil
}

// decodeSlot delivers what is stored in a slot. If it is not done, doubt is what the GPU found wrong, if anything.
func (t *loadTask) decodeSlot(head *store.Head, slot *gds.DirectSlot) (done bool, doubt, err error) {
	r := &pieceReader{engine: t.queue.engine, fence: t.fence, memory: t.spec.Memory, piece: t.piece,
		ids: t.spec.Chunks[t.index].Blocks}
	in := image{device: slot.Address + uint64(head.DataOffset)}
	done = true
	for lo, hi := 0, len(head.Plan.Extents()); lo < hi && done && err == nil; {
		lo, done, doubt, err = r.byGPU(head, lo, hi, in, 0)
	}
	return done, doubt, err
}
