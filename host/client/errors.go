package client

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Errors of a session.
var (
	// ErrHostGone says that no host answers, or that the session with it has ended.
	ErrHostGone = errors.New("client: host is gone")
	// ErrVersion says that the host speaks another version of the protocol: connecting again helps once one of the two was replaced.
	ErrVersion = errors.New("client: cannot talk to the host")
	// ErrForeign says that a user answers who may not have this process's memory.
	ErrForeign = errors.New("client: not the host's socket")
	// ErrClosed says that this process closed the session.
	ErrClosed = errors.New("client: session is closed")
	// ErrArena says that shared memory could not be made or used.
	ErrArena = errors.New("client: bad arena")
)

// Refusals of the host, by the answer's code: errors.Is finds them in a [HostError].
var (
	// ErrInvalid says that a field has a bad value.
	ErrInvalid = errors.New("client: host refused the message")
	// ErrDisagreement says that HELLO contradicts the engine's other sessions.
	ErrDisagreement = errors.New("client: host sees a disagreement")
	// ErrLimit says that one of the host's limits is exceeded.
	ErrLimit = errors.New("client: over a limit of the host")
	// ErrUnknown says that the message names something that does not exist.
	ErrUnknown = errors.New("client: unknown to the host")
	// ErrBusy says that the named thing is in use.
	ErrBusy = errors.New("client: in use")
	// ErrLeaseOver says that the lease was released or used up, or has expired.
	ErrLeaseOver = errors.New("client: lease is over")
	// ErrDamaged says that stored bytes did not verify, or are gone.
	ErrDamaged = errors.New("client: stored bytes are damaged")
	// ErrIO says that the host's storage failed.
	ErrIO = errors.New("client: storage failed")
	// ErrCancelled says that the job was cancelled.
	ErrCancelled = errors.New("client: cancelled")
	// ErrDenied says that this process's user may not do that, as to be the tenant that HELLO names.
	ErrDenied = errors.New("client: host denies it to this user")
	// ErrClosing says that the host is shutting down.
	ErrClosing = errors.New("client: host is closing")
	// ErrInternal says that the host failed in a way that is its own fault.
	ErrInternal = errors.New("client: host failed")
)

var byCode = map[proto.Code]error{
	proto.Code_CODE_INVALID:      ErrInvalid,
	proto.Code_CODE_DISAGREEMENT: ErrDisagreement,
	proto.Code_CODE_LIMIT:        ErrLimit,
	proto.Code_CODE_UNKNOWN:      ErrUnknown,
	proto.Code_CODE_BUSY:         ErrBusy,
	proto.Code_CODE_LEASE_OVER:   ErrLeaseOver,
	proto.Code_CODE_DAMAGED:      ErrDamaged,
	proto.Code_CODE_IO:           ErrIO,
	proto.Code_CODE_CANCELLED:    ErrCancelled,
	proto.Code_CODE_CLOSING:      ErrClosing,
	proto.Code_CODE_INTERNAL:     ErrInternal,
	proto.Code_CODE_DENIED:       ErrDenied,
}

// HostError is the host's refusal of one message, or the failure of one chunk.
type HostError struct {
	Kind    error  // one of the refusals above; nil for a code that this client does not know
	Field   string // of the message, if one was wrong
	Message string
}

func (e *HostError) Error() string {
	if e.Field == "" {
		return "client: host: " + e.Message
	}
	return "client: host: " + e.Field + ": " + e.Message
}

// Unwrap returns Kind.
func (e *HostError) Unwrap() error { return e.Kind }

func refusal(e *proto.Error) error {
	if e.GetField() == "protocol" {
		return fmt.Errorf("%w: %w: protocol %s", ErrVersion, proto.ErrVersion, e.GetMessage())
	}
	return &HostError{Kind: byCode[e.GetCode()], Field: e.GetField(), Message: e.GetMessage()}
}

func failure(code proto.Code, message string) error {
	return &HostError{Kind: byCode[code], Message: message}
}
