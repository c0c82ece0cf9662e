package client

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// EndReason is the reason for the end of a request.
type EndReason uint8

// Reasons, with the numbers of the protocol.
const (
	EndUnknown  EndReason = 0 // the engine gives no reason
	EndStop     EndReason = 1 // the model stopped
	EndLength   EndReason = 2 // the limit of output tokens was reached
	EndToolCall EndReason = 3 // the model called a tool
	EndAbort    EndReason = 4 // the client went away
)

// Hints are facts about a request that the engine knows at its end.
type Hints struct {
	Reason    EndReason
	TokensIn  uint32 // tokens of the prompt
	TokensOut uint32 // generated tokens
	Priority  int32  // priority in the engine's scheduler; lower goes first
	// Return is the expected time until the prefix is used again, in whole milliseconds. 0 means unknown.
	Return time.Duration
}

// EndRequest ends a request and releases its leases. The hints are passed to policies. The zero value gives no hints.
func (s *Session) EndRequest(ctx context.Context, request uint32, hints Hints) error {
	m := &proto.EndRequest{
		Request: request, Reason: proto.EndReason(hints.Reason), TokensIn: hints.TokensIn, TokensOut: hints.TokensOut,
		Priority: hints.Priority, ReturnAfter: durationpb.New(hints.Return),
	}
	_, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_EndRequest{EndRequest: m}})
	return err
}
