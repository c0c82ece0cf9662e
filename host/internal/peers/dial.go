package peers

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
)

// called charges what comes of a peer that this host has called.
type called struct {
	credentials.TransportCredentials
	effort *arrivals.Effort
	addr   string
}

// ClientHandshake implements [credentials.TransportCredentials].
func (t called) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, info, err := t.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		return nil, nil, err
	}
	return arrivals.Dial(c, t.effort, arrivals.Sender{ID: t.addr}), info, nil
}

// Clone implements [credentials.TransportCredentials].
func (t called) Clone() credentials.TransportCredentials {
	return called{t.TransportCredentials.Clone(), t.effort, t.addr}
}

const (
	window   = 8 << 20
	ioBuffer = 256 << 10
)

var (
	aliveParams   = keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}
	connectParams = grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2,
		MaxDelay: 5 * time.Second}, MinConnectTimeout: 2 * time.Second}
)

// dial returns a connection that is established on its first use.
func (h *host) dial(name, addr string) (*grpc.ClientConn, error) {
	server, _, err := net.SplitHostPort(name)
	if err != nil {
		return nil, err
	}
	return grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(called{h.id.calling(server), h.effort, addr}), grpc.WithNoProxy(),
		grpc.WithKeepaliveParams(aliveParams), grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(2*window),
		grpc.WithReadBufferSize(ioBuffer), grpc.WithWriteBufferSize(ioBuffer), grpc.WithConnectParams(connectParams),
		grpc.WithMaxHeaderListSize(mostHeader), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(mostBytes)))
}
