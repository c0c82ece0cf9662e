package server

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/server/codes"
)

// Errors of serving.
var (
	// ErrClosing says that the host is going down.
	ErrClosing = errors.New("server: host is closing")
	// ErrServing says that Serve was called twice.
	ErrServing = errors.New("server: already serving")
	// ErrTooSmall says that a limit cannot be lowered so far while the host runs.
	ErrTooSmall = errors.New("server: restart needed")
)

// Causes of a session's end, besides the stream's own errors.
var (
	errClientDone = errors.New("server: client closed the session")
	// errStreamOver says that the stream broke before the client ended it.
	errStreamOver = errors.New("server: the connection broke: the client died, or did not close its session")
	errRefused    = errors.New("server: HELLO was refused")
	errNoHello    = errors.New("server: no HELLO in time")
	errSlow       = errors.New("server: client does not read its messages")
)

// Reasons why a lease cannot be loaded.
var (
	errLeaseUnknown = errors.New("server: lease was never given")
	errLeaseOver    = errors.New("server: lease is over: released, used or expired")
)

// errWaited says that a job waited for a semaphore of its client for too long.
var errWaited = errors.New("server: the semaphore did not reach wait_value within session.max_wait")

// fault is wrong input: the answer to one message, with code and field.
type fault struct {
	code  proto.Code
	field string
	text  string
}

func (f *fault) Error() string {
	if f.field == "" {
		return f.text
	}
	return f.field + ": " + f.text
}

func faultf(code proto.Code, field, format string, args ...any) *fault {
	return &fault{code, field, fmt.Sprintf(format, args...)}
}

func invalid(field, format string, args ...any) *fault {
	return faultf(proto.Code_CODE_INVALID, field, format, args...)
}

// codeOf returns the code of an error that is not the client's fault.
func codeOf(err error) proto.Code {
	switch {
	case errors.Is(err, errWaited):
		return proto.Code_CODE_LIMIT
	case errors.Is(err, errLeaseOver):
		return proto.Code_CODE_LEASE_OVER
	case errors.Is(err, errLeaseUnknown):
		return proto.Code_CODE_UNKNOWN
	case errors.Is(err, ErrClosing):
		return proto.Code_CODE_CLOSING
	}
	return codes.Of(err)
}

// message converts any error to its wire form.
func message(err error) *proto.Error {
	var f *fault
	if errors.As(err, &f) {
		return &proto.Error{Code: f.code, Field: f.field, Message: f.text}
	}
	return &proto.Error{Code: codeOf(err), Message: err.Error()}
}
