package host

import "errors"

// Errors of a host's start, and of changes. What a part refused is wrapped as that part's own error beside them.
var (
	// ErrPolicy says a policy module was refused.
	ErrPolicy = errors.New("host: policy refused")
	// ErrRole says two modules were given the same role.
	ErrRole = errors.New("host: role taken twice")
	// ErrRestart says what a running host cannot change.
	ErrRestart = errors.New("host: restart needed")
	// ErrHTTP says the read-only listener could not start.
	ErrHTTP = errors.New("host: http listener")
)
