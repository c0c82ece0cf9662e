package staging

import "errors"

// Files.
var (
	// ErrAlign means that I/O on a direct file was not aligned; an [AlignError] has the details.
	ErrAlign = errors.New("staging: not aligned for direct I/O")
	// ErrLocked means that another process, or another part of this one, holds the lock.
	ErrLocked = errors.New("staging: locked by another")
	// ErrHung means that an operation exceeded its time limit and was given up; a [HungError] names it.
	ErrHung = errors.New("staging: no answer")
)

// Memory and workers.
var (
	// ErrClosed means that the pool was closed.
	ErrClosed = errors.New("staging: closed")
	// ErrSlotsOut means that the pool was closed while slots were in use. Its memory is released with the last of them.
	ErrSlotsOut = errors.New("staging: slots still out")
)
