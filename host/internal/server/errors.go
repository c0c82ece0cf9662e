package server

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// Errors of serving.
var (
	// ErrClosing means that the host is shutting down.
	ErrClosing = errors.New("server: host is closing")
)

// Reasons for the end of a session, in addition to the errors of its stream.
var (
	errClientDone = errors.New("server: client closed the session")
	// errStreamOver means that the stream broke before the client closed the session.
	errStreamOver = errors.New("server: the connection broke: the client died, or did not close its session")
	errRefused    = errors.New("server: HELLO was refused")
	errNoHello    = errors.New("server: no HELLO in time")
	errSlow       = errors.New("server: client does not read its messages")
)

// Reasons why a lease cannot be loaded.
var (
	errLeaseUnknown = errors.New("server: lease was never given")
	errLeaseOver    = errors.New("server: lease is over: released, used or expired")
	// errLeaseEarly means that the host ended a lease before its time.
	errLeaseEarly = fmt.Errorf("%w; this one ended early: its tenant's leases held most of a root: load sooner what was "+
		"looked up, or release it", errLeaseOver)
)

// errWaited means that a job waited too long for a semaphore of its client.
var errWaited = errors.New("server: the semaphore did not reach wait_value within session.max_wait")

// errInboxFull means that too many messages of a session are waiting for their turn.
var errInboxFull = errors.New("too many messages of this session are queued already")

// Errors about files that clients share.
var (
	// errNotMapped means that a file does not qualify for mapping.
	errNotMapped = errors.New("server: file refused")
	// errUnprotected means that access to the mapping could allocate pages, because the kernel does not let this process use
	// userfaultfd.
	errUnprotected = errors.New("server: missing pages cannot be refused")
)

// fault is an error in a client's message. It becomes the answer to that message.
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

// at names an element of a repeated field, as in chunks[3].blocks.
func at(list string, i int, field string) string {
	s := list + "[" + strconv.Itoa(i) + "]"
	if field != "" {
		s += "." + field
	}
	return s
}

// groupOf returns a group of a namespace.
func groupOf(ns *kv.Namespace, id uint32) (*kv.Group, error) {
	g, ok := ns.Group(id)
	if !ok {
		return nil, faultf(proto.Code_CODE_UNKNOWN, "group", "the namespace has no group %d", id)
	}
	return g, nil
}
