package capacity

import "errors"

// ErrNoSpace says that a reservation does not fit.
var ErrNoSpace = errors.New("store: no space")
