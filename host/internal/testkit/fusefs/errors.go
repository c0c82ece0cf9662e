package fusefs

import "errors"

// ErrServer means that the process that serves the file system could not start, or has ended.
var ErrServer = errors.New("fusefs: server failed")
