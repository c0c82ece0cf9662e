package host

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/peers"
	"github.com/kvhost/kvhost/staging"
)

// maxMemory is the limit of all that the host holds for others, and the least that the other settings need. By default that is taken on a small
// machine, too.
func maxMemory(c *config.Config) (limit, need int64) {
	need = c.Engine.MaxStagingMemory + 2*budget.LeastMemory*int64(c.Session.MaxSessions)
	need += budget.ArrivingPart(need, c.Engine.MaxStagingMemory) / 7 * 8
	if c.Peers.Listen != "" {
		need += peers.Memory(need / 7 * 8)
	}
	if limit = c.MaxMemory; limit == 0 {
		total, _, _ := staging.MachineMemory()
		limit = max(total/2, need)
	}
	return limit, need
}

// memoryBudgets divides max_memory: staging slots and what other hosts may have this one hold are the host's own, messages that no session has
// yet have a part, and sessions share the rest.
func memoryBudgets(c *config.Config) (memory, arriving *budget.Budget, err error) {
	limit, need := maxMemory(c)
	own, sessions := c.Engine.MaxStagingMemory, c.Session.MaxSessions
	part := budget.ArrivingPart(limit, own)
	if c.Peers.Listen != "" {
		own += peers.Memory(limit)
	}
	if memory, err = budget.OfMemory(limit, own+part, sessions); err != nil {
		return nil, nil, fmt.Errorf("%w: max_memory is too small for engine.max_staging_memory and session.max_sessions, which "+
			"need %s: %w", config.ErrValue, config.SizeText(need), err)
	}
	return memory, budget.OfArriving(part, sessions), nil
}
