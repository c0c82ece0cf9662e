package files

import "errors"

// ErrSync says that something could not be made durable.
var ErrSync = errors.New("store: sync failed")

// ErrBusy says that another host has the root.
var ErrBusy = errors.New("store: root is in use")
