package policyset

import "errors"

// Errors of opening and changing policies. The reason for which a module was refused is wrapped with them.
var (
	// ErrPolicy means that a policy module was refused.
	ErrPolicy = errors.New("host: policy refused")
	// ErrRole means that two modules were given the same role, or that a module lacks one.
	ErrRole = errors.New("host: role taken twice or missing")

	errNoHome = errors.New("neither XDG_CACHE_HOME nor HOME is set")
)
