package transfer

import (
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

// route is a way of bytes between pages and the files of a root. An engine asks its routes in their order, and the first one
// that takes a piece moves it. Another medium is one more implementation, before the staged route, which takes every piece.
// The codec is a stage of a route, between the pages and what the route moves; a route without it refuses compressed pieces.
//
// A worker calls, and may be blocked for as long as the storage blocks. Block ids have been checked, and for a store the
// geometry. A load checks geometry and checksums before a byte reaches a page. Pages are touched only inside the task's fence.
//
// A refusal is errNotHere. The file of a store, the pages and the fence are as they were, and the route holds nothing for the
// task any more. Bytes that a load found wrong are a refusal if the route may have made them so: it leaves its verdict with
// the load of a whole piece, which calls it with the outcome of the routes that are asked next.
//
// Any other error is final. The file of a store that failed may hold anything, and is removed. A load that failed has left
// right bytes or none in each page; its error counts against the piece unless it is the client's, the GPU's or the engine's
// (reportDamage). A store settles its chunk with the last page that it reads, and cannot refuse the put from then on.
//
// Pieces, bytes, errors and times are counted by the task, when it ends, on the route where its span is. A route that takes a
// piece moves the span to itself. Its other counters are its own.
type route interface {
	// store fills the file of a put, its head last.
	store(t *storeTask, f staging.File) error
	// load opens a piece and reads its head. It may deliver extents, too, from the first on: those below done, except for
	// what last will do, which may run on another thread and after the call.
	load(l *loading) error
}

// source is a piece that a route has opened. The steps of a layer-wise load use it at the same time.
type source interface {
	// bring delivers extents [lo, hi). The copy of the last of them may be returned as a function, which runs before the
	// reader's next call, and may run on another thread.
	bring(r *pieceReader, head *store.Head, lo, hi int) (last func() error, err error)
}
