package peers

import (
	"github.com/kvhost/kvhost/host/internal/store"
)

const pageBytes = 4096

// pages extends the start of [off, end) to a page boundary and limits the range to most bytes. It returns the start and the
// length. Files opened with O_DIRECT can only be read in pages.
func pages(off, end, most int64) (from, n int64) {
	from = off &^ (pageBytes - 1)
	return from, min(end-from, most)
}

// readPages reads n bytes of a piece from a page boundary, and the rest of the last page.
func readPages(piece *store.Piece, dst []byte, from, n int64) error {
	_, err := piece.File().ReadAt(dst[:min((n+pageBytes-1)&^(pageBytes-1), piece.Size()-from)], from)
	return err
}
