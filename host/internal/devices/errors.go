package devices

import "errors"

// ErrTooFew means that the machine has fewer GPUs than requested.
var ErrTooFew = errors.New("devices: too few GPUs")
