package transfer

import "errors"

// Errors of a job's chunks and of building its memory.
var (
	// ErrCancelled is the error of a chunk whose job was cancelled before it was done.
	ErrCancelled = errors.New("transfer: cancelled")
	// ErrShed is the error of a chunk that waited longer to be stored than stores may wait.
	ErrShed = errors.New("transfer: waited too long to be stored")
	// ErrClosed says the engine is shutting down.
	ErrClosed = errors.New("transfer: engine is closed")
	// ErrBlocks refuses a job whose block ids do not fit its memory; no byte was touched.
	ErrBlocks = errors.New("transfer: bad block ids")
	// ErrRegion refuses a region that does not hold the pages it promises.
	ErrRegion = errors.New("transfer: bad region")
	// ErrGeometry says a piece's plan is for another shape of chunk than the client's memory.
	ErrGeometry = errors.New("transfer: piece and memory differ in geometry")
	// ErrDamaged says a piece file is not what its entry promises; the entry is dropped and its file quarantined.
	ErrDamaged = errors.New("transfer: damaged piece")
	// ErrDevice says that the GPU failed, not the storage; the piece concerned is not blamed.
	ErrDevice = errors.New("transfer: device memory")
	// ErrProbe says why the direct route does not work between a GPU and a root.
	ErrProbe = errors.New("transfer: the direct route does not work here")
	// errTable says that a piece is of another plan than a slot was made for; it is staged.
	errTable = errors.New("transfer: the piece is of another plan")
	// errPanicked is the error of a chunk whose task panicked: a bug, logged with its stack.
	errPanicked = errors.New("transfer: internal error, see the log")
	// ErrConfig refuses a configuration.
	ErrConfig = errors.New("transfer: bad configuration")
)
