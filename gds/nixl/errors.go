package nixl

import (
	"errors"
	"fmt"
)

var (
	// ErrNoLibrary says that libnixl_capi cannot be loaded.
	ErrNoLibrary = errors.New("nixl: no NIXL library")
	// ErrStub says that the library is the one for builds without NIXL.
	ErrStub = errors.New("nixl: the library is a stub")
	// ErrSymbol says that the library is too old and lacks a function.
	ErrSymbol = errors.New("nixl: library lacks a function")
	// ErrMetadata refuses another agent's metadata.
	ErrMetadata = errors.New("nixl: bad metadata")
	// ErrUnregistered refuses memory that the agent does not have.
	ErrUnregistered = errors.New("nixl: memory is not registered")
	// ErrLength refuses parts with another length than their destination.
	ErrLength = errors.New("nixl: parts and destination differ in length")
	// ErrClosed says that the agent is closed.
	ErrClosed = errors.New("nixl: agent is closed")
)

// Status is a nixl_capi_status_t: 0 is success.
type Status int32

// inProgress is the status of a transfer that has not ended.
const inProgress Status = 1

var statusNames = map[Status]string{
	0: "SUCCESS", inProgress: "IN_PROG", -1: "INVALID_PARAM", -2: "BACKEND", -3: "INVALID_STATE", -4: "EXCEPTION",
	-5: "NO_TELEMETRY", -6: "NOT_FOUND",
}

func (s Status) String() string {
	if name, ok := statusNames[s]; ok {
		return name
	}
	return fmt.Sprintf("status %d", int32(s))
}

// Error is a failed call of the library.
type Error struct {
	Call   string
	Status Status
}

func (e *Error) Error() string { return fmt.Sprintf("nixl: %s: %s", e.Call, e.Status) }
