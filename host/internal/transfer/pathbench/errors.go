package pathbench

import "errors"

var (
	// ErrConfig refuses a configuration.
	ErrConfig = errors.New("pathbench: bad configuration")
	// ErrBytes says that other bytes came back than were stored.
	ErrBytes = errors.New("pathbench: wrong bytes were loaded")
	// ErrPath says that chunks could not be stored or loaded.
	ErrPath = errors.New("pathbench: chunks failed")
)
