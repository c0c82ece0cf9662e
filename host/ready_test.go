package host

import (
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
)

// What makes a host not ready follows the keys http.ready_*.
func TestReady(t *testing.T) {
	st := &proto.StatusResponse{
		Serving:  true,
		Roots:    []*proto.RootStatus{{Path: "a", Scanning: true}},
		Policies: []*proto.PolicyStatus{{Name: "p", State: proto.PolicyState_POLICY_STATE_QUARANTINE}},
	}
	for _, c := range []struct {
		policies, scan bool
		reasons        int
	}{{true, true, 2}, {false, true, 1}, {true, false, 1}, {false, false, 0}} {
		next := config.Default()
		next.HTTP.ReadyPolicies, next.HTTP.ReadyScan = c.policies, c.scan
		h := &Host{cfg: next}
		if why := h.notReady(st); len(why) != c.reasons {
			t.Errorf("state %+v: not ready because of %q", c, why)
		}
	}
}

// A root that its file system leaves no room is in service, and its status says why nothing stays there.
func TestARootWithoutRoom(t *testing.T) {
	for limit, says := range map[int64]string{0: "room for 0 B", 7 << 30: ""} {
		s := rootStatus(&store.RootStats{Capacity: 8 << 30, Limit: limit})
		if s.State != proto.RootState_ROOT_STATE_IN_SERVICE || !strings.Contains(s.Reason, says) || (says == "") != (s.Reason == "") {
			t.Errorf("a root that may hold %d bytes: got %v, %q, want it in service, and %q", limit, s.State, s.Reason, says)
		}
	}
}
