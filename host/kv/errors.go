package kv

import "errors"

// Errors of this package. They are wrapped with the values that caused them.
var (
	ErrKey       = errors.New("chunk: bad key")
	ErrNamespace = errors.New("chunk: bad namespace")
	ErrGeometry  = errors.New("chunk: bad geometry")
	ErrPlan      = errors.New("chunk: bad layout plan")
	ErrChecksum  = errors.New("chunk: checksum mismatch")
)
