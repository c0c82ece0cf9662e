package doctor

import "errors"

var (
	// ErrBytes: a file did not return the bytes that were written to it.
	ErrBytes = errors.New("doctor: the bytes read are not the bytes written")
	// ErrProblems: something configured cannot work; the report names it.
	ErrProblems = errors.New("a host would start, but not all that is configured works on this machine: see the problems above")
)
