package doctor

import "errors"

var (
	// ErrBytes says that a file did not give back what was written to it.
	ErrBytes = errors.New("doctor: other bytes came back than were written")
	// ErrProblems says that something configured cannot work; the report names it.
	ErrProblems = errors.New("doctor: something configured cannot work")
)
