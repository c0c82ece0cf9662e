package files

import "errors"

// ErrSync says that something could not be made durable.
var ErrSync = errors.New("store: sync failed")
