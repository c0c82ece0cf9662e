package abi

import "unsafe"

// FeatureHints is the bit of Info.Features that announces hints in REQUEST_END events.
const FeatureHints = 1 << 0

// EndReason is the reason for the end of a request.
type EndReason uint8

const (
	EndUnknown  EndReason = 0 // the engine gave no reason
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

// ParseEndReason is the inverse of String. Any other text is EndUnknown.
func ParseEndReason(text string) EndReason {
	for r, name := range endReasons {
		if name == text {
			return EndReason(r)
		}
	}
	return EndUnknown
}

// Hints are facts about a request that the engine knows at its end. The zero value gives none.
type Hints struct {
	Reason    EndReason
	TokensIn  uint32 // tokens of the prompt
	TokensOut uint32 // generated tokens
	Priority  int32  // priority in the engine's scheduler; lower goes first
	ReturnMS  uint32 // expected milliseconds until the prefix is used again; 0 means unknown
}

// RequestEnd is the record of an OpRequestEnd. It has the size of an [Event]. Op, Request, Tenant and Time are at the
// same offsets as in an Event, and the other fields are the [Hints].
type RequestEnd struct {
	Slot      uint32 // None, because a request is not an entry
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

// NewRequestEnd returns the end of a request as a record of the EVENTS buffer.
func NewRequestEnd(request, tenant uint32, h Hints, now uint64) Event {
	r := RequestEnd{
		Slot: None, Op: OpRequestEnd, Request: request, Tenant: tenant, Time: now,
		Reason: h.Reason, TokensIn: h.TokensIn, TokensOut: h.TokensOut, Priority: h.Priority, ReturnMS: uint64(h.ReturnMS),
	}
	return *(*Event)(unsafe.Pointer(&r))
}

// RequestEnd returns the record of an event with OpRequestEnd. It shares the event's memory.
func (e *Event) RequestEnd() *RequestEnd { return (*RequestEnd)(unsafe.Pointer(e)) }
