package observe

import (
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
)

// A root that its file system leaves no room is in service, and its status says why nothing stays there.
func TestARootWithoutRoom(t *testing.T) {
	for limit, says := range map[int64]string{0: "room for 0 B", 7 << 30: ""} {
		s := rootStatus(&store.RootStats{Capacity: 8 << 30, Limit: limit})
		if s.State != proto.RootState_ROOT_STATE_IN_SERVICE || !strings.Contains(s.Reason, says) || (says == "") != (s.Reason == "") {
			t.Errorf("a root that may hold %d bytes: got %v, %q, want it in service, and %q", limit, s.State, s.Reason, says)
		}
	}
}
