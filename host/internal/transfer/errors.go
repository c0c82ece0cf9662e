package transfer

import "errors"

// Errors of a job's chunks and of building its memory.
var (
	// ErrCancelled is the error of a chunk when its job was cancelled before it was done.
	ErrCancelled = errors.New("transfer: cancelled")
	// ErrShed is the error of a chunk that waited too long to be stored.
	ErrShed = errors.New("transfer: waited too long to be stored")
	// ErrClosed says that the engine is closed.
	ErrClosed = errors.New("transfer: engine is closed")
	// ErrBlocks refuses a job with block ids that do not fit its memory; no byte was touched.
	ErrBlocks = errors.New("transfer: bad block ids")
	// ErrRegion refuses a region that does not hold the pages it promises.
	ErrRegion = errors.New("transfer: bad region")
	// ErrGeometry says that a piece's plan does not have the geometry of the client's memory.
	ErrGeometry = errors.New("transfer: piece and memory differ in geometry")
	// ErrDamaged says that a piece file does not have the bytes of its entry. The entry is dropped and the file
	// quarantined.
	ErrDamaged = errors.New("transfer: damaged piece")
	// ErrMemory says that client memory cannot be touched: its file has shrunk. The piece is kept.
	ErrMemory = errors.New("transfer: client memory is gone")
	// ErrDevice says that the GPU failed, not the storage: the piece is kept.
	ErrDevice = errors.New("transfer: device memory")
	// ErrProbe says why the direct route does not work between a GPU and a root.
	ErrProbe = errors.New("transfer: the direct route does not work here")
	// errNotHere says that a route refuses a piece; the next route is asked.
	errNotHere = errors.New("transfer: the piece takes another route")
	// errPanicked is the error of a chunk when its task panicked. That is a bug; the log has its stack.
	errPanicked = errors.New("transfer: internal error, see the log")
	// ErrConfig refuses a configuration.
	ErrConfig = errors.New("transfer: bad configuration")
)
