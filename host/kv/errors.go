package kv

import "errors"

// Errors of this package; wrapped with what was found.
var (
	ErrKey       = errors.New("chunk: bad key")
	ErrNamespace = errors.New("chunk: bad namespace")
	ErrGeometry  = errors.New("chunk: bad geometry")
	ErrPlan      = errors.New("chunk: bad layout plan")
	ErrChecksum  = errors.New("chunk: checksum mismatch")
)
