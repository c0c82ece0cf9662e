package proto

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// Status asks the host behind a socket for its status, on a connection of its own.
func Status(ctx context.Context, socket string) (_ *StatusResponse, err error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials())) // the socket has mode 0600
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	st, err := NewStatusServiceClient(conn).Status(ctx, &StatusRequest{})
	return st, Plain(socket, err)
}
