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
	// ErrWrongPiece is a sound piece under the name of another one.
	ErrWrongPiece = errors.New("the file holds another piece")
	// ErrUnknownPlan is a piece with a layout plan that its root does not hold.
	ErrUnknownPlan = errors.New("unknown layout plan")
)

// IsDamage says that an error is about the content of a file, not about reading it.
func IsDamage(err error) bool {
	return errors.Is(err, ErrUnknownFormat) || errors.Is(err, ErrNotPiece) || errors.Is(err, ErrDamaged)
}
