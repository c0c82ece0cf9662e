package sim

import "errors"

// Errors of this package.
var (
	// ErrCapacity: a capacity cannot be read, or is less than one chunk.
	ErrCapacity = errors.New("sim: bad capacity")
	// ErrTrace: a trace holds nothing to simulate, or too much.
	ErrTrace = errors.New("sim: unusable trace")
	// ErrPolicy: a policy's name or settings cannot be read.
	ErrPolicy = errors.New("sim: bad policy")
)
