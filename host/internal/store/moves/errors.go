package moves

import "errors"

// A move ends without a copy.
var (
	// ErrCancelled says that the entry has gone, or that nobody wants the copy any more.
	ErrCancelled = errors.New("store: move is cancelled")
	// ErrBehind says that nothing of a level can go without loss at present: what leaves has no copy yet.
	ErrBehind = errors.New("store: demotions of the level are behind")
	// ErrLayout says that new pieces of the group have another layout than the entry's.
	ErrLayout = errors.New("store: the entry has an earlier layout, which is not written any more")
	// ErrTable says that a piece has a longer table than is copied at a time. There is nothing wrong with the piece.
	ErrTable = errors.New("store: the piece has too many extents to be copied")
)
