package host

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// notReady returns the reasons why the host is not ready in the sense of http.ready_roots.
func (h *Host) notReady(st *proto.StatusResponse) (why []string) {
	if !st.Serving {
		why = append(why, "starting: clients cannot connect yet")
	}
	in := 0
	var out []string
	for _, r := range st.Roots {
		if r.State == proto.RootState_ROOT_STATE_OUT {
			out = append(out, fmt.Sprintf("root %s is out of service: %s", r.Path, r.Reason))
		} else {
			in++
		}
		if r.Scanning {
			why = append(why, fmt.Sprintf("root %s is being scanned: chunks that the scan has not found yet are misses", r.Path))
		}
	}
	switch h.cfg.HTTP.ReadyRoots {
	case config.RootsAll:
		why = append(why, out...)
	case config.RootsAny:
		if in == 0 {
			why = append(why, out...)
		}
	}
	for _, p := range st.Policies {
		if p.State == proto.PolicyState_POLICY_STATE_QUARANTINE && p.Trial == nil {
			why = append(why, fmt.Sprintf("policy %s is in quarantine, the built-in one decides: %s", p.Name, p.Reason))
		}
	}
	return why
}
