package abi

import "testing"

// The places of hints in a REQUEST_END event are published: kits in other languages read them there.
func TestHintsInAnEvent(t *testing.T) {
	h := Hints{Reason: EndToolCall, TokensIn: 7000, TokensOut: 52, Priority: -3, ReturnMS: 1500}
	e := RequestEnd(9, 4, h, 77)
	if e.Hints() != h {
		t.Errorf("%+v", e.Hints())
	}
	want := Event{
		Slot: None, Parent: None, Key: 1500, ParentKey: 0xfffffffd, Size: 7000, Depth: 52, Request: 9, Tenant: 4,
		Op: OpRequestEnd, Tier: 3, Time: 77,
	}
	if e != want {
		t.Errorf("%+v, want %+v", e, want)
	}
	for r := EndUnknown; r <= EndAbort; r++ {
		if ParseEndReason(r.String()) != r {
			t.Errorf("%s", r)
		}
	}
	if ParseEndReason("weather") != EndUnknown || EndReason(99).String() != "unknown" {
		t.Error("a reason that nobody knows")
	}
}
