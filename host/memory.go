package host

import (
	"fmt"

	"github.com/kvhost/kvhost/host/budget"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/policyset"
	"github.com/kvhost/kvhost/host/server/share"
)

// memoryBudget divides max_memory: staging slots are the host's own, and sessions share the rest. By default the least
// that the other settings need is taken on a small machine, too.
func memoryBudget(c *config.Config) (*budget.Budget, error) {
	limit, own := c.MaxMemory, c.Engine.MaxStagingMemory
	need := own + 2*share.LeastMemory*int64(c.Session.MaxSessions)
	if limit == 0 {
		limit = max(int64(policyset.AvailableMemory()/2), need)
	}
	b, err := share.MemoryBudget(limit, own, c.Session.MaxSessions)
	if err != nil {
		return nil, fmt.Errorf("host: max_memory is too small for engine.max_staging_memory and session.max_sessions, which "+
			"need %s: %w", config.FormatSize(need), err)
	}
	return b, nil
}
