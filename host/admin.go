package host

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// admin is the gRPC service that changes a running host.
type admin struct {
	proto.UnimplementedAdminServer
	policies *policyset.Set
}

func (a admin) SwapPolicy(ctx context.Context, q *proto.SwapPolicyRequest) (*proto.SwapPolicyReply, error) {
	s, err := a.policies.Swap(ctx, q.Name, config.Policy{Module: q.Module, SHA256: q.Sha256, Config: q.Config})
	return swapReply(s, err)
}

func (a admin) PromotePolicy(ctx context.Context, q *proto.PromotePolicyRequest) (*proto.SwapPolicyReply, error) {
	s, err := a.policies.Promote(ctx, q.Name, q.Root)
	return swapReply(s, err)
}

func swapReply(s policyset.Swapped, err error) (*proto.SwapPolicyReply, error) {
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	out := &proto.SwapPolicyReply{Module: s.Module, Digest: s.Digest}
	for _, t := range s.Taken {
		out.Taken = append(out.Taken, &proto.PolicyTaken{
			Role: t.Role.String(), Root: t.Root, From: t.From, Handover: t.Handover.String(), Entries: uint64(t.Entries), Seconds: t.Took.Seconds(),
		})
	}
	return out, nil
}
