package host

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/peers"
)

// Defaults of a host with enough max_memory, and the smallest default number of sessions.
const (
	stagingMemory = 512 << 20
	mostSessions  = 1024
	leastSessions = 16
)

// OnMachine returns a copy of the configuration in which all sizes that depend on the memory of the machine, or of its control
// group, are set.
func OnMachine(c *config.Config, bytes int64) *config.Config {
	c = c.Clone()
	if c.PolicyMemory == 0 {
		c.PolicyMemory = bytes / 4
	}
	limit := c.MaxMemory
	if limit == 0 {
		limit = bytes / 2
	}
	if c.Engine.MaxStagingMemory == config.Auto {
		c.Engine.MaxStagingMemory = max(c.Engine.SlotBytes, min(stagingMemory, limit/4>>20<<20))
	}
	if c.Session.MaxSessions == 0 {
		c.Session.MaxSessions = mostSessions
		if _, pool := divided(c, limit); pool < 2*budget.LeastMemory*mostSessions {
			c.Session.MaxSessions = max(leastSessions, int(pool/2/budget.LeastMemory))
		}
	}
	if c.MaxMemory == 0 {
		c.MaxMemory = max(limit, leastOf(c))
	}
	return c
}

// divided splits a limit in bytes. The host's own part is for staging slots, messages that no session has yet, and what other hosts may make
// this host hold. The rest is for sessions.
func divided(c *config.Config, limit int64) (own, sessions int64) {
	own = c.Engine.MaxStagingMemory + budget.ArrivingPart(limit, c.Engine.MaxStagingMemory)
	if c.Peers.Listen != "" {
		own += peers.Memory(limit)
	}
	return own, limit - own
}

// leastOf returns the smallest max_memory with which each session gets its minimum under the other settings.
func leastOf(c *config.Config) int64 {
	need := 2 * budget.LeastMemory * int64(c.Session.MaxSessions)
	limit := need
	for own, sessions := divided(c, limit); sessions < need; own, sessions = divided(c, limit) {
		limit = own + need
	}
	return limit
}

// memoryBudgets divides max_memory.
func memoryBudgets(c *config.Config) (memory, arriving *budget.Budget, err error) {
	if need := leastOf(c); c.MaxMemory < need {
		return nil, nil, fmt.Errorf("%w: max_memory is %s, and engine.max_staging_memory %s and session.max_sessions %d need %s", config.ErrValue,
			config.SizeText(c.MaxMemory), config.SizeText(c.Engine.MaxStagingMemory), c.Session.MaxSessions, config.SizeText(need))
	}
	own, _ := divided(c, c.MaxMemory)
	if memory, err = budget.OfMemory(c.MaxMemory, own, c.Session.MaxSessions); err != nil {
		return nil, nil, err
	}
	return memory, budget.OfArriving(budget.ArrivingPart(c.MaxMemory, c.Engine.MaxStagingMemory), c.Session.MaxSessions), nil
}
