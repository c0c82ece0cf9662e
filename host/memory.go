package host

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policyset"
)

// memoryBudgets divides max_memory: staging slots are the host's own, messages that no session has yet have a part, and
// sessions share the rest. By default the least that the other settings need is taken on a small machine, too.
func memoryBudgets(c *config.Config) (memory, arriving *budget.Budget, err error) {
	limit, staging, sessions := c.MaxMemory, c.Engine.MaxStagingMemory, c.Session.MaxSessions
	need := staging + 2*budget.LeastMemory*int64(sessions)
	need += budget.ArrivingPart(need, staging) / 7 * 8
	if limit == 0 {
		limit = max(int64(policyset.AvailableMemory()/2), need)
	}
	part := budget.ArrivingPart(limit, staging)
	if memory, err = budget.OfMemory(limit, staging+part, sessions); err != nil {
		return nil, nil, fmt.Errorf("host: max_memory is too small for engine.max_staging_memory and session.max_sessions, which "+
			"need %s: %w", config.FormatSize(need), err)
	}
	return memory, budget.OfArriving(part, sessions), nil
}
