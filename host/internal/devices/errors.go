package devices

import "errors"

// ErrTooFew says that a machine has GPUs, but not as many as are wanted.
var ErrTooFew = errors.New("devices: too few GPUs")
