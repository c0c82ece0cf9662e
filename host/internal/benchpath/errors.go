package benchpath

import "errors"

// ErrHost says that the host did not start or ended with an error.
var ErrHost = errors.New("benchpath: host failed")
