package transfer

import (
	"cmp"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

// bundle collects copies of small pieces from memory to a GPU's pages, and makes them in one launch. A launch and the
// wait for its end take as long as the transfer of some hundred KiB, and a step of a layer-wise load moves only about
// that much of the piece of one KV head.
//
// If bytes of one copy are wrong, the launch makes none, and each is then verified and made by itself.
type bundle struct {
	memory *DeviceMemory
	fence  *fence
	engine *Engine
	parts  []part
	bytes  int64 // of the parts in a window
	count  int   // of their extents
}

// add adds the copy of extents [lo, hi) from src, which stays as it is until the copy was made.
func (b *bundle) add(r *pieceReader, src []byte, head *store.Head, lo, hi int, base int64) {
	p := part{r: r.extentRange(head, lo, hi, base), src: src, reader: r}
	from, to := p.window()
	size := aligned(to - from)
	if !b.memory.gpu.FitsWindow(b.bytes+size, b.count+hi-lo) {
		b.flush()
	}
	b.parts, b.bytes, b.count = append(b.parts, p), b.bytes+size, b.count+hi-lo
	r.bundled = true
}

// flush makes the copies inside the fence. Their readers get the errors.
func (b *bundle) flush() {
	parts := b.parts
	b.parts, b.bytes, b.count = nil, 0, 0
	if len(parts) == 0 {
		return
	}
	if !b.fence.enter() {
		for _, p := range parts {
			p.reader.late = cmp.Or(p.reader.late, ErrCancelled)
		}
		return
	}
	defer b.fence.leave()
	began := time.Now()
	b.memory.scatterParts(parts)
	took, sum := time.Since(began), int64(0)
	for _, p := range parts {
		n := pageBytes(p.r.extents())
		if sum += n; p.err != nil {
			p.reader.late = cmp.Or(p.reader.late, p.err)
			continue
		}
		staging.Moved(p.reader.piece.File(), staging.Read, n, took/time.Duration(len(parts)))
	}
	b.engine.scatters.Observe(sum, took)
}
