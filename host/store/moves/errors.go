package moves

import "errors"

// A move ends without a copy.
var (
	// ErrCancelled says that the entry has gone, or that nobody wants the copy any more.
	ErrCancelled = errors.New("store: move is cancelled")
	// ErrLayout says that new pieces of the group have another layout than the entry's.
	ErrLayout = errors.New("store: the entry has an earlier layout, which is not written any more")
)
