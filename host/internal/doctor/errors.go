package doctor

import "errors"

var (
	// ErrBytes means that a file did not return the bytes that were written to it.
	ErrBytes = errors.New("doctor: the bytes read are not the bytes written")
	// ErrProblems means that a part of the configuration cannot work. The report names the part.
	ErrProblems = errors.New("a host would start, but not all that is configured works on this machine: see the problems above")
)
