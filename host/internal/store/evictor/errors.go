package evictor

import "errors"

// ErrSuperseded says that another policy has taken over meanwhile.
var ErrSuperseded = errors.New("store: another policy has taken over")
