package bench

import "errors"

var (
	// ErrConfig means that the configuration is not valid.
	ErrConfig = errors.New("bench: bad configuration")
	// errBytes means that loaded bytes differ from the stored ones.
	errBytes = errors.New("bench: wrong bytes were loaded")
	// errChunks means that chunks could not be stored or loaded.
	errChunks = errors.New("bench: chunks failed")
	// errHost means that the host did not start or ended with an error.
	errHost = errors.New("bench: host failed")
)
