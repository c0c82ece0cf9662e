package client

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Errors of a session.
var (
	// ErrHostGone means that no host answers, or that the session with it has ended.
	ErrHostGone = errors.New("client: host is gone")
	// ErrVersion means that the host speaks another version of the protocol. A new connection helps only after one of the two
	// was replaced.
	ErrVersion = errors.New("client: cannot talk to the host")
	// ErrForeign means that the process behind the socket belongs to a user who must not get this process's memory.
	ErrForeign = errors.New("client: not the host's socket")
	// ErrClosed means that this process closed the session.
	ErrClosed = errors.New("client: session is closed")
	// ErrArena means that shared memory could not be created or used.
	ErrArena = errors.New("client: bad arena")
)

// Refusals of the host, by the code of its answer. errors.Is finds them in a [HostError].
var (
	// ErrInvalid means that a field has a bad value.
	ErrInvalid = errors.New("client: host refused the message")
	// ErrDisagreement means that HELLO contradicts the engine's other sessions.
	ErrDisagreement = errors.New("client: host sees a disagreement")
	// ErrLimit means that one of the host's limits is exceeded.
	ErrLimit = errors.New("client: over a limit of the host")
	// ErrUnknown means that the message names something that does not exist.
	ErrUnknown = errors.New("client: unknown to the host")
	// ErrBusy means that something that the message names is in use.
	ErrBusy = errors.New("client: in use")
	// ErrLeaseOver means that the lease was released or used up, or has expired.
	ErrLeaseOver = errors.New("client: lease is over")
	// ErrDamaged means that stored bytes failed verification or are gone.
	ErrDamaged = errors.New("client: stored bytes are damaged")
	// ErrIO means that the host's storage failed.
	ErrIO = errors.New("client: storage failed")
	// ErrCancelled means that the job was cancelled.
	ErrCancelled = errors.New("client: cancelled")
	// ErrDenied means that this process's user lacks the permission, for example to act for the tenant that HELLO names.
	ErrDenied = errors.New("client: host denies it to this user")
	// ErrClosing means that the host is shutting down.
	ErrClosing = errors.New("client: host is closing")
	// ErrInternal means that the host failed by its own fault.
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
	Field   string // wrong field of the message, or empty
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
