package client

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// EndReason is why a request ended.
type EndReason uint8

// The reasons, with the numbers of the protocol.
const (
	EndUnknown  EndReason = 0 // the engine does not tell
	EndStop     EndReason = 1 // the model stopped
	EndLength   EndReason = 2 // the limit of output tokens was reached
	EndToolCall EndReason = 3 // the model called a tool
	EndAbort    EndReason = 4 // the client went away
)

// Hints are what an engine tells about a request when it ends.
type Hints struct {
	Reason    EndReason
	TokensIn  uint32 // of the prompt
	TokensOut uint32 // generated
	Priority  int32  // as the engine schedules: lower goes first
	// Return is how long it is expected to take until the prefix is used again, to the millisecond; 0: unknown.
	Return time.Duration
}

// EndRequest ends a request and releases its leases. The hints tell policies what the request did; the zero value tells
// nothing.
func (s *Session) EndRequest(ctx context.Context, request uint32, hints Hints) error {
	m := &proto.EndRequest{
		Request: request, Reason: proto.EndReason(hints.Reason), TokensIn: hints.TokensIn, TokensOut: hints.TokensOut,
		Priority: hints.Priority, ReturnAfter: durationpb.New(hints.Return),
	}
	_, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_EndRequest{EndRequest: m}})
	return err
}
