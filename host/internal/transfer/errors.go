package transfer

import (
	"errors"
	"fmt"
)

// Errors of a job's chunks and of building its memory.
var (
	// ErrCancelled is the error of a chunk when its job was cancelled before it was done.
	ErrCancelled = errors.New("transfer: cancelled")
	// ErrShed is the error of a chunk that waited too long to be stored.
	ErrShed = errors.New("transfer: waited too long to be stored")
	// ErrClosed means that the engine is closed.
	ErrClosed = errors.New("transfer: engine is closed")
	// ErrBlocks means that the block ids of a job do not fit its memory. No byte was touched.
	ErrBlocks = errors.New("transfer: bad block ids")
	// ErrRegion means that a region is too small for its pages.
	ErrRegion = errors.New("transfer: bad region")
	// ErrGeometry means that a piece's plan does not have the geometry of the client's memory.
	ErrGeometry = errors.New("transfer: piece and memory differ in geometry")
	// ErrDamaged means that a piece file does not have the bytes of its entry. The entry is dropped and the file
	// quarantined.
	ErrDamaged = errors.New("transfer: damaged piece")
	// ErrMemory means that client memory cannot be touched: its file has shrunk. The piece is kept.
	ErrMemory = errors.New("transfer: client memory is gone")
	// ErrDevice means that the GPU failed, not the storage: the piece is kept.
	ErrDevice = errors.New("transfer: device memory")
	// ErrProbe means that the direct route does not work between a GPU and a root. It wraps the reason.
	ErrProbe = errors.New("transfer: the direct route does not work here")
	// errNotHere means that a route refuses a piece; the next route is asked.
	errNotHere = errors.New("transfer: the piece takes another route")
	// errPanicked is the error of a chunk when its task panicked. That is a bug; the log has its stack.
	errPanicked = errors.New("transfer: internal error, see the log")
	// ErrConfig means that the configuration is not valid.
	ErrConfig = errors.New("transfer: bad configuration")
)

// RegionError is an [ErrRegion] of one region.
type RegionError struct {
	Region        int // index of the region
	Field, Reason string
}

func (e *RegionError) Error() string {
	return fmt.Sprintf("%v: regions[%d].%s: %s", ErrRegion, e.Region, e.Field, e.Reason)
}

// Unwrap returns [ErrRegion].
func (e *RegionError) Unwrap() error { return ErrRegion }
