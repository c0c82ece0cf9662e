package abi

// FeatureHints is the bit of Info.Features that says that REQUEST_END events carry [Hints].
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

// Hints are what an engine tells about a request when it ends. The zero value tells nothing. They travel in the fields of a
// REQUEST_END event that have no other meaning there.
type Hints struct {
	Reason    EndReason
	TokensIn  uint32 // of the prompt
	TokensOut uint32 // generated
	Priority  int32  // as the engine schedules: lower goes first
	ReturnMS  uint32 // the prefix is expected to be used again after so many milliseconds; 0: unknown
}

// Hints reads the hints of a REQUEST_END event.
func (e *Event) Hints() Hints {
	return Hints{
		Reason: EndReason(e.Tier), TokensIn: e.Size, TokensOut: e.Depth,
		Priority: int32(e.ParentKey), ReturnMS: uint32(e.Key),
	}
}

// SetHints writes the hints of a REQUEST_END event.
func (e *Event) SetHints(h Hints) {
	e.Tier, e.Size, e.Depth = uint8(h.Reason), h.TokensIn, h.TokensOut
	e.ParentKey, e.Key = uint64(uint32(h.Priority)), uint64(h.ReturnMS)
}

// RequestEnd returns a REQUEST_END event.
func RequestEnd(request, tenant uint32, h Hints, now uint64) Event {
	e := Event{Op: OpRequestEnd, Slot: None, Parent: None, Request: request, Tenant: tenant, Time: now}
	e.SetHints(h)
	return e
}
