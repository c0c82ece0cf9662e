package socket

import (
	"context"
	"os"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Tenants is a rule for a range of tenants.
type Tenants struct {
	First, Last uint32
	UIDs        []uint32 // users with processes that may be these tenants; nil: any
	Private     bool     // they see their own entries only, and no other tenant sees those
	Sessions    int      // most sessions of each; 0: no limit of its own
}

// Rules are those of a host. For each of a rule's fields the first rule counts that fits a tenant and sets it.
type Rules []Tenants

// of is the first rule for a tenant that sets a field.
func (r Rules) of(tenant uint32, sets func(*Tenants) bool) (t Tenants) {
	for i := range r {
		if t := &r[i]; t.First <= tenant && tenant <= t.Last && sets(t) {
			return *t
		}
	}
	return t
}

// Allow says whether a user's process may be a tenant. Once any tenant has users, a tenant is for the users only that are
// named for it.
func (r Rules) Allow(uid, tenant uint32) bool {
	if !r.bound() {
		return true
	}
	return slices.Contains(r.of(tenant, func(t *Tenants) bool { return t.UIDs != nil }).UIDs, uid)
}

// Private says whether a tenant's entries are its own.
func (r Rules) Private(tenant uint32) bool {
	return r.of(tenant, func(t *Tenants) bool { return t.Private }).Private
}

// Sessions is the most sessions of a tenant, 0 for no limit.
func (r Rules) Sessions(tenant uint32) int {
	return r.of(tenant, func(t *Tenants) bool { return t.Sessions > 0 }).Sessions
}

func (r Rules) bound() bool {
	return slices.ContainsFunc(r, func(t Tenants) bool { return t.UIDs != nil })
}

// Users are the users that any tenant has.
func (r Rules) Users() (uids []uint32) {
	for _, t := range r {
		uids = append(uids, t.UIDs...)
	}
	return uids
}

// isolates says whether tenants are kept from learning of each other.
func (r Rules) isolates() bool {
	return r.bound() || slices.ContainsFunc(r, func(t Tenants) bool { return t.Private })
}

// Caller is who makes a call. Without a socket it is the host itself.
func Caller(ctx context.Context) Peer {
	if p, ok := peer.FromContext(ctx); ok {
		if u, ok := p.AuthInfo.(Peer); ok {
			return u
		}
	}
	return Peer{UID: uint32(os.Geteuid())}
}

// check refuses calls that are for the operator: all that changes the host, and, where tenants are isolated, what tells of
// all of them.
func (r Rules) check(ctx context.Context, method string) error {
	switch method {
	case proto.EngineService_Session_FullMethodName:
		return nil
	case proto.EngineService_Events_FullMethodName, proto.StatusService_Status_FullMethodName:
		if !r.isolates() {
			return nil
		}
	}
	if p := Caller(ctx); !p.Operator() {
		return status.Errorf(codes.PermissionDenied, "%s is for root and the host's own user, and this process runs as %d",
			method, p.UID)
	}
	return nil
}

// Checks make a server check every call by the rules of the moment.
func Checks(rules func() Rules) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.UnaryInterceptor(func(ctx context.Context, q any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := rules().check(ctx, info.FullMethod); err != nil {
				return nil, err
			}
			return next(ctx, q)
		}),
		grpc.StreamInterceptor(func(srv any, st grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			if err := rules().check(st.Context(), info.FullMethod); err != nil {
				return err
			}
			return next(srv, st)
		}),
	}
}
