package transfer

import (
	"errors"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// Extents of a GPU's pages are coded in the memory of a window's coder, so that only stored bytes cross the bus:
//
//	store:  pages --gather--> window --checksums, encode, checksums--> --copy engine--> slot --WriteAt--> temporary
//	load:   piece --ReadAt--> slot --copy engine--> --checksums, decode, checksums--> window --scatter--> pages
//
// The extents of one window are coded at a time. If the GPU has no coder, or the coder has just failed, the processor
// codes them. No wrong byte has reached a page then.
//
// The counted time of the codec is the time of a piece between pages and slot, less that of a plain piece of the same
// size. It is the whole time before the first plain piece.

// beyond returns the time of extents that the GPU codes, less the time that they would take plain.
func beyond(plain *staging.Bandwidth, pages int64, took time.Duration) time.Duration {
	if rate := plain.BytesPerSecond(); rate > 0 {
		took -= time.Duration(float64(pages) / float64(rate) * float64(time.Second))
	}
	return max(took, 1)
}

// coded returns the end of the extents that a coder can code in one batch. They begin at lo, end at hi at the latest,
// and have at most room page bytes. base is the payload offset of the window's first byte. The end is lo if there is no
// coder.
func coded(m Memory, extents []kv.Extent, lo, hi int, room int64) (mid int, base int64) {
	mid, base = lo, extents[lo].Off&^(pieceformat.Page-1)
	f, ok := m.(*DeviceMemory)
	for ok && mid < hi && end(extents[mid])-base <= room && f.gpu.FitsCoder(end(extents[mid])-base, mid+1-lo) {
		mid++
	}
	return mid, base
}

// image is stored bytes of a file: in a slot of the host or, if that is nil, in device memory.
type image struct {
	host   []byte
	device uint64
}

// part returns the image's bytes [from, to).
func (i image) part(from, to int64) image {
	if i.host == nil {
		return image{device: i.device + uint64(from)}
	}
	return image{host: i.host[from:to]}
}

// elementOnGPU is the element size in bytes that the GPU uses for all data types. Twice as many threads decode two
// planes as one, and values of one byte gain as much: on an H200, 4 MiB of fp8 took 480 us instead of 870, with a ratio
// of 1.22 both times.
const elementOnGPU = 2

// byGPU encodes extents from lo on into buf. It returns the index after the last encoded extent, which is lo if the GPU
// codes none.
func (c *compressedWriter) byGPU(lo int) (hi int, err error) {
	if !hasCoder(c.task.memory) {
		return lo, nil
	}
	extents := c.plan.Extents()
	room := len(c.buf) - c.filled
	hi, base := coded(c.task.memory, extents, lo, len(extents), int64(room))
	if hi < len(extents) && room < len(c.buf)/2 { // little room is left
		if err := c.flush(); err != nil {
			return lo, err
		}
		hi, base = coded(c.task.memory, extents, lo, len(extents), int64(len(c.buf)-c.filled))
	}
	if hi == lo {
		return lo, nil
	}
	n, took, err := c.encode(lo, hi, base, image{host: c.buf[c.filled:]}, c.stored)
	c.took += took
	switch {
	case errors.Is(err, errNotHere):
		return lo, nil
	case err != nil:
		return lo, err
	}
	c.filled += n
	return hi, nil
}

// encode has the GPU write extents [lo, hi) to an image, inside the fence, and returns the stored bytes and the codec's
// time. It returns errNotHere if the coder did not code them: the processor does it then.
func (w *pieceWriter) encode(
	lo, hi int, base int64, to image, stored []pieceformat.Stored,
) (n int, took time.Duration, err error) {
	done, err := w.fenced(lo, hi, base, func(r ExtentRange) (done bool, err error) {
		n, took, done, err = w.task.memory.(*DeviceMemory).encode(&r, to, stored)
		took = beyond(&w.task.queue.engine.gathers, pageBytes(r.extents()), took)
		return done, err
	})
	return n, took, refused(done, err)
}

// encode gathers the range's pages, writes their stored bytes to an image, without gaps, and their table rows to
// stored. When done, err is the result.
func (m *DeviceMemory) encode(
	r *ExtentRange, to image, stored []pieceformat.Stored,
) (n int, took time.Duration, done bool, err error) {
	lost := m.gpu.Do(func(t *gds.Thread) {
		began := time.Now()
		w, c := t.Window(), t.Coder()
		count := place(w.Extents, r.extents(), r.Base)
		b := w.Begin(gds.Gather, m.flag)
		if err = m.add(&b, r); err != nil {
			return
		}
		n, err = c.Encode(&b, count, elementOnGPU, to.device)
		if err == nil && to.host != nil {
			err = c.Read(to.host[:n])
		}
		took = time.Since(began)
		if err != nil {
			err = errors.Join(err, w.Sync())
			return
		}
		copy(r.Table[r.Lo:r.Hi], w.Sums)
		for i, x := range c.Stored[:count] {
			stored[r.Lo+i] = pieceformat.Stored{Sum: c.Sums[i], Len: x.Len, Codec: uint8(x.Codec)}
		}
	})
	if lost == nil && err == nil {
		m.gpu.CoderSucceeded()
		return n, took, true, nil
	}
	done, err = m.coderFailed(lost, err)
	return 0, took, done, err
}

// byGPU delivers extents [lo, mid), which are stored in an image from base on; mid is the first extent that it did not
// reach. If it is not done, no byte reached a page, and doubt says which bytes the GPU found wrong, if any.
func (r *pieceReader) byGPU(
	head *store.Head, lo, hi int, in image, base int64,
) (mid int, done bool, doubt, err error) {
	extents := head.Plan.Extents()
	mid, from := coded(r.memory, extents, lo, hi, end(extents[hi-1]))
	if mid == lo {
		return hi, false, nil, nil
	}
	if !r.fence.enter() {
		return mid, false, nil, ErrCancelled
	}
	defer r.fence.leave() // also when the copy panics: the fence must be able to close
	x := ExtentRange{Plan: head.Plan, Lo: lo, Hi: mid, Unit: r.unit, Blocks: r.ids, Base: from, Table: head.Table}
	src := in.part(head.Offsets[lo]-base, head.Offsets[mid]-base)
	took, done, doubt, err := r.memory.(*DeviceMemory).decode(&x, head.Stored[lo:mid], src)
	if done && err == nil {
		pages := pageBytes(x.extents())
		r.piece.Decoded(pages, head.Offsets[mid]-head.Offsets[lo], beyond(&r.engine.scatters, pages, took))
	}
	return mid, done, doubt, err
}

// decode decodes the range's extents from src to the pages. When done, err is the result. Otherwise no wrong byte
// reached a page, and doubt says which bytes the GPU found wrong, if that is the reason.
func (m *DeviceMemory) decode(
	r *ExtentRange, stored []pieceformat.Stored, src image,
) (took time.Duration, done bool, doubt, err error) {
	lost := m.gpu.Do(func(t *gds.Thread) {
		began := time.Now()
		w, c := t.Window(), t.Coder()
		n, at := place(w.Extents, r.extents(), r.Base), uint64(0)
		copy(w.Expected, r.Table[r.Lo:r.Hi])
		for i, x := range stored {
			c.Stored[i], c.Expected[i] = gds.Extent{Offset: at, Len: x.Len, Codec: uint32(x.Codec)}, x.Sum
			at += uint64(x.Len)
		}
		b := w.Begin(gds.Scatter, m.flag)
		from := src.device
		if src.host != nil {
			from, err = c.Upload(&b, src.host)
		}
		if err == nil {
			err = c.Decode(&b, from, n)
		}
		if err == nil {
			err = m.add(&b, r)
		}
		if err == nil {
			err = b.Wait()
		}
		if err != nil {
			err = errors.Join(err, w.Sync())
			return
		}
		doubt, took = c.Check(n), time.Since(began)
	})
	if lost != nil || err != nil {
		done, err = m.coderFailed(lost, err)
		return took, done, nil, err
	}
	if doubt == nil {
		m.gpu.CoderSucceeded()
	}
	return took, doubt == nil, doubt, nil
}

// coderFailed is windowFailed for a coder: the processor then codes the extents.
func (m *DeviceMemory) coderFailed(lost, err error) (done bool, _ error) {
	return m.failed(lost, err, m.gpu.CoderFailed)
}

// refused returns errNotHere if the coder is not done: the processor then codes the piece.
func refused(done bool, err error) error {
	if err == nil && !done {
		return errNotHere
	}
	return err
}
