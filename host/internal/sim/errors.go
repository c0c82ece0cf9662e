package sim

import "errors"

// Errors of this package.
var (
	// ErrCapacity: a capacity is malformed, or less than one chunk.
	ErrCapacity = errors.New("sim: bad capacity")
	// ErrTrace: a trace has no accesses, or too many.
	ErrTrace = errors.New("sim: unusable trace")
	// ErrLevel: levels, their speeds or how they are written are malformed.
	ErrLevel = errors.New("sim: bad level")
	// ErrPolicy: a policy's name or settings are malformed.
	ErrPolicy = errors.New("sim: bad policy")
)
