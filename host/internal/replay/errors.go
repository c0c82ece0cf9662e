package replay

import "errors"

// Errors of this package.
var (
	// ErrOptions means that the options contradict each other or are out of range.
	ErrOptions = errors.New("replay: bad options")
	// ErrMismatch means that loaded bytes differ from the stored ones.
	ErrMismatch = errors.New("replay: wrong bytes were served")
	// ErrFailures means that the host could not store or load some chunks. No wrong byte was served.
	ErrFailures = errors.New("replay: the host failed to store or load chunks")
)
