package sandbox

// Limits that every instance is told.
const (
	MaxBatch   = 256 // records in one call
	MaxVictims = 1024
)

// DefaultPages is the default limit of an instance's memory: 64 MiB, and more for one with slots.
const DefaultPages = 1024

// Setup is the number of records of a call that sets up an instance. Such a call is always timed.
const Setup = -1
