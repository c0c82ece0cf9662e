package host

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/config"
)

// What the configuration leaves to the machine is divided so that a host starts, whatever the machine or its control group has, and what the
// operator has set stays.
func TestOnMachine(t *testing.T) {
	for name, c := range map[string]struct {
		machine           int64
		change            func(*config.Config)
		limit             int64
		staging, sessions int64
	}{
		"a large machine": {1 << 40, func(*config.Config) {}, 1 << 39, 512 << 20, 1024},
		"4 GiB":           {4 << 30, func(*config.Config) {}, 2 << 30, 512 << 20, 1024},
		"3 GiB":           {3 << 30, func(*config.Config) {}, 1536 << 20, 384 << 20, 1008},
		"1 GiB":           {1 << 30, func(*config.Config) {}, 512 << 20, 128 << 20, 336},
		"256 MiB":         {256 << 20, func(*config.Config) {}, 128 << 20, 32 << 20, 84},
		"1 MiB":           {1 << 20, func(*config.Config) {}, 23368265, 4 << 20, 16}, // more than there is: the least
		"lending":         {1 << 30, func(c *config.Config) { c.Peers.Listen = "127.0.0.1:1" }, 512 << 20, 128 << 20, 272},
		"a limit":         {1 << 40, func(c *config.Config) { c.MaxMemory = 512 << 20 }, 512 << 20, 128 << 20, 336},
		"sessions":        {1 << 30, func(c *config.Config) { c.Session.MaxSessions = 1024 }, 1361351241, 128 << 20, 1024},
		"staging memory":  {1 << 30, func(c *config.Config) { c.Engine.MaxStagingMemory = 1 << 30 }, 1<<30 + 19173961, 1 << 30, 16},
	} {
		given := config.Default()
		given.PolicyMemory = 0
		c.change(given)
		got := OnMachine(given, c.machine)
		if got.MaxMemory != c.limit || got.Engine.MaxStagingMemory != c.staging || int64(got.Session.MaxSessions) != c.sessions ||
			got.PolicyMemory != c.machine/4 {
			t.Errorf("%s: max_memory %d, max_staging_memory %d, max_sessions %d, policy_memory %d; want %d, %d, %d and a quarter", name, got.MaxMemory,
				got.Engine.MaxStagingMemory, got.Session.MaxSessions, got.PolicyMemory, c.limit, c.staging, c.sessions)
		}
		if again := OnMachine(got, 1<<50); again.MaxMemory != got.MaxMemory || again.PolicyMemory != got.PolicyMemory {
			t.Errorf("%s: numbers become others: %+v", name, again)
		}
		if _, _, err := memoryBudgets(got); err != nil {
			t.Errorf("%s: the numbers leave no memory to sessions: %v", name, err)
		}
	}
}
