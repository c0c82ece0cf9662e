package socket

import "errors"

var (
	// ErrInUse says that another process answers on the socket, or holds its lock.
	ErrInUse = errors.New("the socket is in use")
	// ErrPath says that the socket cannot be made at its path.
	ErrPath = errors.New("the socket cannot be made")
)
