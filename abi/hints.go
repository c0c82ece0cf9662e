package abi

import "unsafe"

// FeatureHints is the bit of Info.Features that says that REQUEST_END events carry hints.
const FeatureHints = 1 << 0

// EndReason is why a request ended.
type EndReason uint8

const (
	EndUnknown  EndReason = 0 // the engine did not tell
	EndStop     EndReason = 1 // the model stopped
	EndLength   EndReason = 2 // the limit of output tokens was reached
	EndToolCall EndReason = 3 // the model called a tool: its answer is likely to continue the prefix
	EndAbort    EndReason = 4 // the client went away
)

var endReasons = [...]string{"unknown", "stop", "length", "tool_call", "abort"}

func (r EndReason) String() string {
	if int(r) < len(endReasons) {
		return endReasons[r]
	}
	return endReasons[EndUnknown]
}

// ParseEndReason is the inverse of String; other text is EndUnknown.
func ParseEndReason(text string) EndReason {
	for r, name := range endReasons {
		if name == text {
			return EndReason(r)
		}
	}
	return EndUnknown
}

// Hints are what an engine tells about a request when it ends. The zero value tells nothing.
type Hints struct {
	Reason    EndReason
	TokensIn  uint32 // of the prompt
	TokensOut uint32 // generated
	Priority  int32  // as the engine schedules: lower goes first
	ReturnMS  uint32 // the prefix is expected to be used again after so many milliseconds; 0: unknown
}

// RequestEnd is the record of an OpRequestEnd. It has the size of an [Event], and Op, Request, Tenant and Time where an
// Event has them; the other fields are the [Hints].
type RequestEnd struct {
	Slot      uint32 // None: a request is no entry
	_         uint32
	ReturnMS  uint64
	Priority  int32
	_         uint32
	TokensIn  uint32
	TokensOut uint32
	Request   uint32
	Tenant    uint32
	Op        Op
	Reason    EndReason
	_         [6]byte
	Time      uint64
}

// RequestEndSize is the stride of a [RequestEnd].
const RequestEndSize = EventSize

// NewRequestEnd returns a request's end as a record of the EVENTS buffer.
func NewRequestEnd(request, tenant uint32, h Hints, now uint64) Event {
	r := RequestEnd{
		Slot: None, Op: OpRequestEnd, Request: request, Tenant: tenant, Time: now,
		Reason: h.Reason, TokensIn: h.TokensIn, TokensOut: h.TokensOut, Priority: h.Priority, ReturnMS: uint64(h.ReturnMS),
	}
	return *(*Event)(unsafe.Pointer(&r))
}

// RequestEnd is the record of an event with OpRequestEnd. It shares the event's memory.
func (e *Event) RequestEnd() *RequestEnd { return (*RequestEnd)(unsafe.Pointer(e)) }
