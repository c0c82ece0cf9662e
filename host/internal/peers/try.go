package peers

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// NIXL says what this host has of NIXL: its library and the ways that UCX has found. It is empty where there is none.
func (p *Peers) NIXL() (says string, err error) {
	if p.nixl == nil {
		return "", nil
	}
	ways, err := p.nixl.lib.Transports()
	return fmt.Sprintf("%s %s, UCX has found %s", p.nixl.lib.Path(), p.nixl.lib.Version(), strings.Join(ways, ", ")), err
}

// Tried is what an address of a peer has answered.
type Tried struct {
	Address string
	NIXL    error   // why it is not read by NIXL, if both hosts have it
	Speed   float64 // of READs, bytes a second; 0: by gRPC alone
}

// Try asks a host's peer at each of its addresses, and measures how fast its memory is read by NIXL. The error says which do not answer,
// or why it has no address.
func (p *Peers) Try(ctx context.Context, name string) (list []Tried, err error) {
	host, port, err := net.SplitHostPort(name)
	if err != nil {
		return nil, err
	}
	ips, err := net.DefaultResolver.LookupHost(ctx, host)
	for _, ip := range ips {
		at := net.JoinHostPort(ip, port)
		if tried, e := p.try(ctx, name, at); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", at, e))
		} else {
			list = append(list, tried)
		}
	}
	return list, err
}

func (p *Peers) try(ctx context.Context, name, at string) (t Tried, err error) {
	t.Address = at
	if p.id == nil && !isLoopback(at) {
		return t, ErrPlaintext
	}
	line, err := p.dial(name, at)
	if err != nil {
		return t, err
	}
	defer line.Close()
	client := proto.NewPeerServiceClient(line)
	stream, err := client.Residents(ctx, &proto.ResidentsRequest{})
	if err != nil {
		return t, errors.New(status.Convert(err).Message())
	}
	m, err := stream.Recv()
	if err != nil {
		return t, errors.New(status.Convert(err).Message())
	}
	if w := p.nixl; w != nil && len(m.GetNixl()) > 0 && !slices.Equal(m.GetHost(), p.self[:]) {
		t.Speed, t.NIXL = w.measure(ctx, client, &remote{name: hex.EncodeToString(m.GetHost()), wanted: true}, m.GetNixl())
	}
	return t, nil
}
