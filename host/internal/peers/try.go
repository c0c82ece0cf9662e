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

// NIXL describes the NIXL library of this host and the transports that UCX found. It is empty if NIXL is not in use.
func (p *Peers) NIXL() (says string, err error) {
	if p.nixl == nil {
		return "", nil
	}
	ways, err := p.nixl.lib.Transports()
	return fmt.Sprintf("%s %s, UCX has found %s", p.nixl.lib.Path(), p.nixl.lib.Version(), strings.Join(ways, ", ")), err
}

// Tried is the result of asking a peer at one of its addresses.
type Tried struct {
	Address string
	NIXL    error   // why NIXL cannot read the peer; nil if it can, or if a host lacks NIXL
	Speed   float64 // bytes a second of NIXL reads; 0 if the peer is read by gRPC only
}

// Try asks the peer at each address that its name resolves to, and measures the speed of NIXL reads from it. The error lists
// the addresses without an answer, or says why the name does not resolve.
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
