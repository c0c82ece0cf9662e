package capacity

import "errors"

// ErrNoSpace says that a reservation does not fit.
var ErrNoSpace = errors.New("store: no space")

// ErrEvictor says that the evictor freed too little for a reservation that waits.
var ErrEvictor = errors.New("the evictor has freed too little")
