package entries

import "errors"

// ErrResident says that a piece is there already, or is being written by somebody else.
var ErrResident = errors.New("store: piece is resident")
