package sandbox

// Limits that every instance is told.
const (
	MaxBatch   = 256 // records in one call
	MaxVictims = 1024
)

// DefaultPages bounds the memory of a module that does not state its need: 64 MiB.
const DefaultPages = 1024

// Setup is the number of records of a call that sets up an instance. Such a call is always timed.
const Setup = -1
