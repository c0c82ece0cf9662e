package host

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// admin is the gRPC service that changes a running host.
type admin struct {
	proto.UnimplementedAdminServiceServer
	host *Host
}

func (a admin) Reload(ctx context.Context, _ *proto.ReloadRequest) (*proto.ReloadResponse, error) {
	changed, err := a.host.Reread(ctx)
	if err != nil {
		code := codes.Aborted
		is := func(targets ...error) bool {
			return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
		}
		switch {
		case is(policyset.ErrPolicy, policyset.ErrRole):
			code = codes.FailedPrecondition
		case is(config.ErrFile, config.ErrKey, config.ErrValue, ErrRestart):
			code = codes.InvalidArgument
		}
		return nil, status.Error(code, err.Error())
	}
	return &proto.ReloadResponse{Changed: changed}, nil
}

func (a admin) SwapPolicy(ctx context.Context, q *proto.SwapPolicyRequest) (*proto.SwapPolicyResponse, error) {
	s, err := a.host.policies.Swap(ctx, q.Name, config.Policy{Module: q.Module, SHA256: q.Sha256, Config: q.Config})
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &proto.SwapPolicyResponse{Swap: swapMessage(&s)}, nil
}

func (a admin) PromotePolicy(ctx context.Context, q *proto.PromotePolicyRequest) (*proto.PromotePolicyResponse, error) {
	s, err := a.host.policies.Promote(ctx, q.Name, q.Root)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &proto.PromotePolicyResponse{Swap: swapMessage(&s)}, nil
}

func swapMessage(s *policyset.Swapped) *proto.Swap {
	out := &proto.Swap{Module: s.Module, Digest: observe.Digest(s.Digest)}
	for _, t := range s.Taken {
		out.Taken = append(out.Taken, &proto.PolicyTaken{
			Role: proto.Value[proto.PolicyRole](t.Role.String()), Root: t.Root, From: observe.Digest(t.From),
			Handover: proto.Value[proto.Handover](t.Handover.String()), Entries: uint64(t.Entries), Time: durationpb.New(t.Took),
		})
	}
	return out
}
