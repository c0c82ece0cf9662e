package socket

import "errors"

var (
	// ErrInUse means that another process answers on the socket or holds its lock.
	ErrInUse = errors.New("the socket is in use")
	// ErrPath means that the socket cannot be created at its path.
	ErrPath = errors.New("the socket cannot be made")
)
