package host

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// A host is not ready while a root is scanned, a policy is in quarantine, or roots are out of service that http.ready_roots wants.
func TestReady(t *testing.T) {
	st := &proto.StatusResponse{
		Serving:  true,
		Roots:    []*proto.RootStatus{{Path: "a", Scanning: true}, {Path: "b", State: proto.RootState_ROOT_STATE_OUT}},
		Policies: []*proto.PolicyStatus{{Name: "p", State: proto.PolicyState_POLICY_STATE_QUARANTINE}},
	}
	for rule, reasons := range map[string]int{config.RootsAll: 3, config.RootsAny: 2, config.RootsNone: 2} {
		h := &Host{cfg: config.Default()}
		h.cfg.HTTP.ReadyRoots = rule
		if why := h.notReady(st); len(why) != reasons {
			t.Errorf("http.ready_roots = %s: not ready because of %q, want %d reasons", rule, why, reasons)
		}
	}
}
