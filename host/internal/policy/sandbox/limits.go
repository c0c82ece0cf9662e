package sandbox

// Limits in the Info of every instance.
const (
	MaxBatch   = 256 // records in one call
	MaxVictims = 1024
)

// DefaultPages is the default limit of an instance's memory: 64 MiB. An instance with slots gets more.
const DefaultPages = 1024

// Setup is the number of records of a call that sets up an instance. Such a call is always timed.
const Setup = -1
