package transfer

import (
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// The direct route of a compressed piece: the slot has its file as it is stored, and the GPU codes between the slot and a
// window.
//
//	store:  pages --gather--> window --checksums, encode--> slot --checksums--> --cuFile--> payload of the temporary
//	load:   piece --cuFile--> slot --checksums, decode--> window --checksums, then scatter--> pages

// fillEncoded is fill for a piece that is compressed. It refuses the piece while the pages are still needed.
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

// refused is the error of what the coder did not do: a piece that is not done is left to the processor.
func refused(done bool, err error) error {
	if err == nil && !done {
		return errNotHere
	}
	return err
}

// decodeSlot delivers what is stored in a slot. doubt is what the GPU found wrong, if anything.
func (l *loading) decodeSlot(head *store.Head, slot *gds.DirectSlot) (doubt, err error) {
	in := image{device: slot.Address + uint64(head.DataOffset)}
	done := true
	for lo, hi := 0, len(head.Plan.Extents()); lo < hi && done && err == nil; {
		lo, done, doubt, err = l.byGPU(head, lo, hi, in, 0)
	}
	return doubt, refused(done, err)
}
