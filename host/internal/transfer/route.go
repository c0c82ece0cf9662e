package transfer

import (
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

// route moves bytes between pages and the files of a root. An engine asks its routes in order, and the first that takes
// a piece moves it. A new route comes before the staged route, which takes every piece. The codec is a stage of a
// route, between the pages and the bytes that the route moves; a route without a codec refuses compressed pieces.
//
// A worker calls the methods, and may be blocked for as long as the storage blocks. Block ids have been checked, and
// for a store the geometry. A load checks geometry and checksums before a byte reaches a page. Pages are touched only
// inside the task's fence.
//
// A refusal is errNotHere. It leaves the file of a store, the pages and the fence unchanged, and the route holds no
// resource for the task. A load that finds wrong bytes refuses the piece if the route may have caused them. It then
// sets verdict, which is called with the outcome of the routes that are asked next.
//
// Any other error is final. The file of a failed store may have any content, and is removed. A failed load has left
// right bytes or none in each page; its error counts against the piece unless it is the client's, the GPU's or the
// engine's (reportDamage). A store settles its chunk when it has read the last page, and cannot refuse the put
// afterwards.
//
// At its end a task counts pieces, bytes, errors and times on the route of its span. A route that takes a piece moves
// the span to itself. A route keeps its other counters itself.
type route interface {
	// store fills the file of a put, its head last.
	store(t *storeTask, f staging.File) error
	// load opens a piece and reads its head. It may also deliver extents: it then sets done to the end of those
	// extents. If the copy of the last of them is still to be made, last makes it, possibly on another thread and after
	// the call.
	load(l *loading) error
}

// source is a piece that a route has opened. The steps of a layer-wise load use it at the same time.
type source interface {
	// bring delivers extents [lo, hi). The copy of the last of them may be returned as a function, which runs before the
	// reader's next call, and may run on another thread.
	bring(r *pieceReader, head *store.Head, lo, hi int) (last func() error, err error)
}
