package fsck

import "errors"

// A check does not run, or not to its end.
var (
	// ErrRoot is a directory that cannot be read or is no root.
	ErrRoot = errors.New("fsck: not a root")
	// ErrProblems says that problems were found, and not all of them repaired.
	ErrProblems = errors.New("fsck: problems remain")
)

// errChanging is a file that was another each time it was looked at: a host is at work on it.
var errChanging = errors.New("fsck: the file changes")
