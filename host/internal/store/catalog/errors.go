package catalog

import "errors"

var (
	// ErrUnknownNamespace is a namespace that nobody has opened and whose text no root holds, or a group that it lacks.
	ErrUnknownNamespace = errors.New("unknown namespace or group")
	// ErrTooMany is a namespace or group beyond those that one host can tell apart.
	ErrTooMany = errors.New("too many namespaces or groups")
	// ErrNoPolicy says that no policy of that name has the role.
	ErrNoPolicy = errors.New("no such policy")
	// ErrAlien is a piece that its namespace cannot have.
	ErrAlien = errors.New("piece of another namespace than it says")
)
