package socket

import (
	"context"
	"os"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/proto"
)

func TestRules(t *testing.T) {
	r := Rules{
		{First: 7, Last: 7, UIDs: []uint32{1007}, Sessions: 2}, {First: 3, Last: 9, UIDs: []uint32{1003, 1004}, Private: true},
		{First: 0, Last: 1<<32 - 1, Sessions: 5},
	}
	for _, c := range []struct {
		uid, tenant uint32
		may         bool
	}{
		{1007, 7, true}, {1003, 7, false}, {1004, 3, true}, {1007, 4, false}, {0, 7, false},
		{1007, 0, false}, {1009, 10, false}, // no rule names them
	} {
		if r.Allow(c.uid, c.tenant) != c.may {
			t.Errorf("user %d, tenant %d: %t", c.uid, c.tenant, !c.may)
		}
	}
	if !r.Private(7) || r.Private(2) || r.Sessions(7) != 2 || r.Sessions(8) != 5 || len(r.Users()) != 3 {
		t.Errorf("rules of tenants: got private %t, %t, sessions %d, %d, users %d", r.Private(7), r.Private(2), r.Sessions(7), r.Sessions(8), r.Users())
	}
	if none := (Rules{{Last: 9, Sessions: 1}}); !none.Allow(77, 12) || none.isolates() {
		t.Error("without users any may be any tenant")
	}
}

// What changes the host is for the operator. So is what tells of all tenants, once they are kept apart.
func TestOperatorsCalls(t *testing.T) {
	as := func(uid uint32) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{AuthInfo: Peer{UID: uid}})
	}
	other := uint32(os.Geteuid()) + 1000
	apart := Rules{{First: 1, Last: 1, Private: true}}
	for _, c := range []struct {
		rules  Rules
		uid    uint32
		method string
		may    bool
	}{
		{nil, other, proto.EngineService_Session_FullMethodName, true}, {nil, other, proto.StatusService_Status_FullMethodName, true},
		{nil, other, proto.AdminService_SwapPolicy_FullMethodName, false}, {nil, 0, proto.AdminService_SwapPolicy_FullMethodName, true},
		{nil, uint32(os.Geteuid()), proto.AdminService_PromotePolicy_FullMethodName, true}, {nil, other, "/kvhost.v1.New/Call", false},
		{apart, other, proto.EngineService_Session_FullMethodName, true}, {apart, other, proto.EngineService_Events_FullMethodName, false},
		{apart, other, proto.StatusService_Status_FullMethodName, false}, {apart, 0, proto.EngineService_Events_FullMethodName, true},
	} {
		err := c.rules.check(as(c.uid), c.method)
		if c.may != (err == nil) || err != nil && status.Code(err) != codes.PermissionDenied {
			t.Errorf("user %d calls %s: %v", c.uid, c.method, err)
		}
	}
}
