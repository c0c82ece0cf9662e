package benchpath

import "errors"

var (
	// ErrHost says that the host did not start or ended with an error.
	ErrHost = errors.New("benchpath: host failed")
	// ErrPython says that the Python client could not be used.
	ErrPython = errors.New("benchpath: Python client failed")
)
