package client

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Results and reasons have the numbers of the protocol, and each of its codes is an error of this package.
func TestNumbersAreTheProtocols(t *testing.T) {
	for own, wire := range map[Result]proto.ChunkResult{
		Stored: proto.ChunkResult_CHUNK_RESULT_STORED, Resident: proto.ChunkResult_CHUNK_RESULT_RESIDENT,
		Refused: proto.ChunkResult_CHUNK_RESULT_REFUSED, Shed: proto.ChunkResult_CHUNK_RESULT_SHED,
		Failed: proto.ChunkResult_CHUNK_RESULT_FAILED,
	} {
		if int32(own) != int32(wire) {
			t.Errorf("%v is %d, want %d as %v", own, own, wire, wire)
		}
	}
	for own, wire := range map[DiscardResult]proto.DiscardResult{
		Removed: proto.DiscardResult_DISCARD_RESULT_REMOVED, Absent: proto.DiscardResult_DISCARD_RESULT_ABSENT,
		InUse: proto.DiscardResult_DISCARD_RESULT_IN_USE, OtherTenant: proto.DiscardResult_DISCARD_RESULT_OTHER_TENANT,
		Unavailable: proto.DiscardResult_DISCARD_RESULT_UNAVAILABLE,
	} {
		if int32(own) != int32(wire) {
			t.Errorf("%v is %d, want %d as %v", own, own, wire, wire)
		}
	}
	for own, wire := range map[EndReason]proto.EndReason{
		EndUnknown: proto.EndReason_END_REASON_UNSPECIFIED, EndStop: proto.EndReason_END_REASON_STOP,
		EndLength: proto.EndReason_END_REASON_LENGTH, EndToolCall: proto.EndReason_END_REASON_TOOL_CALL,
		EndAbort: proto.EndReason_END_REASON_ABORT,
	} {
		if int32(own) != int32(wire) {
			t.Errorf("reason %d, want %d as %v", own, wire, wire)
		}
	}
	if a, b, c, d := len(proto.ChunkResult_name), len(proto.DiscardResult_name), len(proto.EndReason_name), len(proto.Code_name); a != 6 ||
		b != 6 || c != 5 || d != len(byCode)+1 {
		t.Errorf("the protocol has %d, %d, %d results and reasons and %d codes, want 6, 6, 5 and %d: add what is new here",
			a, b, c, d, len(byCode)+1)
	}
}
