package host

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
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
