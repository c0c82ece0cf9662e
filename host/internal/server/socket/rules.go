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
	UIDs        []uint32 // users that may act for these tenants; nil if the rule does not set any
	Private     bool     // the tenants see only their own entries, and no other tenant sees those
	Sessions    int      // most sessions of each tenant; 0 if the rule sets no limit
}

// Rules are the rules of a host. Each field of a tenant comes from the first rule that covers the tenant and sets the field.
type Rules []Tenants

// of returns the first rule that covers a tenant and sets a field.
func (r Rules) of(tenant uint32, sets func(*Tenants) bool) (t Tenants) {
	for i := range r {
		if t := &r[i]; t.First <= tenant && tenant <= t.Last && sets(t) {
			return *t
		}
	}
	return t
}

// Allow reports whether a user's process may act for a tenant. If any rule sets users, every tenant is limited to the users
// that are set for it.
func (r Rules) Allow(uid, tenant uint32) bool {
	if !r.bound() {
		return true
	}
	return slices.Contains(r.of(tenant, func(t *Tenants) bool { return t.UIDs != nil }).UIDs, uid)
}

// Private reports whether a tenant's entries are visible only to itself.
func (r Rules) Private(tenant uint32) bool {
	return r.of(tenant, func(t *Tenants) bool { return t.Private }).Private
}

// Sessions returns the maximum number of sessions of a tenant. 0 means no limit.
func (r Rules) Sessions(tenant uint32) int {
	return r.of(tenant, func(t *Tenants) bool { return t.Sessions > 0 }).Sessions
}

func (r Rules) bound() bool {
	return slices.ContainsFunc(r, func(t Tenants) bool { return t.UIDs != nil })
}

// Users returns the users of all tenants.
func (r Rules) Users() (uids []uint32) {
	for _, t := range r {
		uids = append(uids, t.UIDs...)
	}
	return uids
}

// isolates reports whether tenants must not learn about each other.
func (r Rules) isolates() bool {
	return r.bound() || slices.ContainsFunc(r, func(t Tenants) bool { return t.Private })
}

// Caller returns the peer that makes a call. For a call without a socket it is the host itself.
func Caller(ctx context.Context) Peer {
	if p, ok := peer.FromContext(ctx); ok {
		if u, ok := p.AuthInfo.(Peer); ok {
			return u
		}
	}
	return Peer{UID: uint32(os.Geteuid())}
}

// check refuses calls that are reserved for the operator. These are all calls that change the host. If tenants are isolated,
// calls that reveal data of all tenants are reserved, too.
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

// Checks returns server options that check each call against the current rules.
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
