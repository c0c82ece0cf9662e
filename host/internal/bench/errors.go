package bench

import "errors"

var (
	// ErrConfig refuses a configuration.
	ErrConfig = errors.New("bench: bad configuration")
	// errBytes says that other bytes came back than were stored.
	errBytes = errors.New("bench: wrong bytes were loaded")
	// errChunks says that chunks could not be stored or loaded.
	errChunks = errors.New("bench: chunks failed")
	// errHost says that the host did not start or ended with an error.
	errHost = errors.New("bench: host failed")
)
