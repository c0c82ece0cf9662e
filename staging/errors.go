package staging

import "errors"

// Files.
var (
	// ErrAlign: I/O on a direct file was not aligned; an [AlignError] says in what.
	ErrAlign = errors.New("staging: not aligned for direct I/O")
	// ErrLocked: another process, or another part of this one, holds the lock.
	ErrLocked = errors.New("staging: locked by another")
	// ErrHung: an operation took longer than its limit and was given up; a [HungError] says which.
	ErrHung = errors.New("staging: no answer")
)

// Memory and workers.
var (
	// ErrClosed: the pool takes nothing any more.
	ErrClosed = errors.New("staging: closed")
	// ErrSlotsOut: the pool was closed while slots were out; its memory goes with the last of them.
	ErrSlotsOut = errors.New("staging: slots still out")
)
