package janitor

import "errors"

// A janitor does not run, or cannot keep its promise.
var (
	// ErrConfig is a configuration that cannot be.
	ErrConfig = errors.New("janitor: bad configuration")
	// ErrInUse says that a host has the directory, and bounds it itself.
	ErrInUse = errors.New("janitor: a host has this directory")
	// ErrOver says that the directory takes more than its capacity, and that no more of it may go.
	ErrOver = errors.New("janitor: over capacity")
)
