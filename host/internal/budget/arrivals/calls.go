package arrivals

import (
	"context"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/stats"
)

// Calls passes the calls of a gRPC server, and the messages that they have received, to the connections on which they run. The
// function returns the connection of a call, or nil.
type Calls func(credentials.AuthInfo) *Conn

// HandleRPC implements [stats.Handler].
func (of Calls) HandleRPC(ctx context.Context, s stats.RPCStats) {
	p, _ := peer.FromContext(ctx)
	if p == nil {
		return
	}
	c := of(p.AuthInfo)
	if c == nil {
		return
	}
	switch s := s.(type) {
	case *stats.Begin:
		c.called()
	case *stats.InPayload:
		c.received(s.Length)
	case *stats.End:
		c.ended()
	}
}

// TagRPC implements [stats.Handler].
func (Calls) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// TagConn implements [stats.Handler].
func (Calls) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements [stats.Handler].
func (Calls) HandleConn(context.Context, stats.ConnStats) {}
