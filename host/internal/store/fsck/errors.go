package fsck

import "errors"

// A check does not run, or not to its end.
var (
	// ErrRoot is a directory that cannot be read or is no root.
	ErrRoot = errors.New("fsck: not a root")
	// ErrProblems says that problems were found, and not all of them repaired.
	ErrProblems = errors.New("fsck: problems remain")
)

var (
	// errChanging is a file that changed each time it was read: a host is writing to it.
	errChanging = errors.New("fsck: the file changes")
	// errUnknownNamespace is a piece of a namespace whose text the root does not hold.
	errUnknownNamespace = errors.New("unknown namespace")
)
