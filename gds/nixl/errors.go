package nixl

import (
	"errors"
	"fmt"
)

var (
	// ErrNoLibrary means that libnixl_capi cannot be loaded.
	ErrNoLibrary = errors.New("nixl: no NIXL library")
	// ErrStub means that the library is the one for builds without NIXL.
	ErrStub = errors.New("nixl: the library is a stub")
	// ErrSymbol means that the library is too old and lacks a function.
	ErrSymbol = errors.New("nixl: library lacks a function")
	// ErrMetadata means that another agent's metadata is not valid.
	ErrMetadata = errors.New("nixl: bad metadata")
	// ErrUnregistered means that memory is not registered with the agent.
	ErrUnregistered = errors.New("nixl: memory is not registered")
	// ErrLength means that parts and their destination differ in length.
	ErrLength = errors.New("nixl: parts and destination differ in length")
	// ErrClosed means that the agent is closed.
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
