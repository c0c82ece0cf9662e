package abi

import "testing"

// A request's end stands among events: where its fields are in one is published.
func TestRequestEndIsAnEvent(t *testing.T) {
	h := Hints{Reason: EndToolCall, TokensIn: 7000, TokensOut: 52, Priority: -3, ReturnMS: 1500}
	e := NewRequestEnd(9, 4, h, 77)
	if e.Op != OpRequestEnd || e.Slot != None || e.Request != 9 || e.Tenant != 4 || e.Time != 77 {
		t.Errorf("the event of a request's end is %+v", e)
	}
	want := RequestEnd{
		Slot: None, ReturnMS: 1500, Priority: -3, TokensIn: 7000, TokensOut: 52, Request: 9, Tenant: 4,
		Op: OpRequestEnd, Reason: EndToolCall, Time: 77,
	}
	if got := *e.RequestEnd(); got != want {
		t.Errorf("the request's end reads as %+v, want %+v", got, want)
	}
}

func TestParseEndReason(t *testing.T) {
	for r := EndUnknown; r <= EndAbort; r++ {
		if got := ParseEndReason(r.String()); got != r {
			t.Errorf("%q parses as %v", r.String(), got)
		}
	}
	if got := ParseEndReason("weather"); got != EndUnknown {
		t.Errorf("an unknown reason parses as %v", got)
	}
	if got := EndReason(99).String(); got != "unknown" {
		t.Errorf("reason 99 prints as %q, want unknown", got)
	}
}
