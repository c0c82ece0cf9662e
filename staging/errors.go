package staging

import "errors"

// Files.
var (
	// ErrAlign means that I/O on a direct file was not aligned; an [AlignError] has the details.
	ErrAlign = errors.New("staging: not aligned for direct I/O")
	// ErrLocked means that another process, or another part of this one, holds the lock.
	ErrLocked = errors.New("staging: locked by another")
	// ErrOutside means that a name is not below the directories that an FS is of.
	ErrOutside = errors.New("staging: outside the directory")
	// ErrNotRegular means that what has the name of a file is none.
	ErrNotRegular = errors.New("staging: not a regular file")
	// ErrLinked means that a file that was to be written has several names.
	ErrLinked = errors.New("staging: the file has several names")
	// ErrKernel means that the kernel, or a sandbox around the process, cannot open files below a directory only.
	ErrKernel = errors.New("staging: no openat2: want Linux 5.6 or newer, and a sandbox that lets it through")
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
