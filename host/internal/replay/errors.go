package replay

import "errors"

// Errors of this package.
var (
	// ErrOptions: the options contradict each other or are out of range.
	ErrOptions = errors.New("replay: bad options")
	// ErrMismatch: loaded bytes differ from the stored ones.
	ErrMismatch = errors.New("replay: wrong bytes were served")
	// ErrFailures: the host reported chunks that it could not store or load; no wrong byte was served.
	ErrFailures = errors.New("replay: the host failed to store or load chunks")
)
