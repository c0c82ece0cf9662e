package pieceformat

import "errors"

// A file is not what it should be.
var (
	// ErrUnknownFormat is a piece of a format version, flag or algorithm that this host does not know.
	ErrUnknownFormat = errors.New("unknown piece format")
	// ErrNotPiece is a file that does not start like a piece.
	ErrNotPiece = errors.New("not a piece file")
	// ErrDamaged is a file whose contents contradict each other.
	ErrDamaged = errors.New("damaged file")
)
