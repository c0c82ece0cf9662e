package host

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/staging"
)

// memoryBudgets divides max_memory: staging slots are the host's own, messages that no session has yet have a part, and
// sessions share the rest. By default the least that the other settings need is taken on a small machine, too.
func memoryBudgets(c *config.Config) (memory, arriving *budget.Budget, err error) {
	limit, slots, sessions := c.MaxMemory, c.Engine.MaxStagingMemory, c.Session.MaxSessions
	need := slots + 2*budget.LeastMemory*int64(sessions)
	need += budget.ArrivingPart(need, slots) / 7 * 8
	if limit == 0 {
		total, _, _ := staging.MachineMemory()
		limit = max(total/2, need)
	}
	part := budget.ArrivingPart(limit, slots)
	if memory, err = budget.OfMemory(limit, slots+part, sessions); err != nil {
		return nil, nil, fmt.Errorf("%w: max_memory is too small for engine.max_staging_memory and session.max_sessions, which "+
			"need %s: %w", config.ErrValue, config.SizeText(need), err)
	}
	return memory, budget.OfArriving(part, sessions), nil
}
