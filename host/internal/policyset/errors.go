package policyset

import "errors"

// Errors of opening and changing policies. They wrap the reason for which a module was refused.
var (
	// ErrPolicy means that a policy module was refused.
	ErrPolicy = errors.New("host: policy refused")
	// ErrRole means that two modules were given the same role, or that a module lacks a role.
	ErrRole = errors.New("host: role taken twice or missing")

	errNoHome = errors.New("neither XDG_CACHE_HOME nor HOME is set")
)
