package share

import (
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/budget"
)

// Budgets are what sessions share.
type Budgets struct {
	Memory      *budget.Budget // bytes
	Descriptors *budget.Budget // that wait for a message
	Room        *budget.Budget // bytes on disk

	said atomic.Int64 // when a refusal was logged last, in nanoseconds
}

// Refused logs for the operator who holds most, once a second at most: a client learns its own figures only.
func (b *Budgets) Refused(log *slog.Logger, err error) {
	now := time.Now().UnixNano()
	if last := b.said.Load(); now-last < int64(time.Second) || !b.said.CompareAndSwap(last, now) {
		return
	}
	f := b.Memory.Figures(3)
	log.Warn("message refused: the session's share is used up", "error", err, "held", f.Held, "sessions", f.Holders, "most", f.Most)
}

// Parts of the memory.
const (
	partSessions = iota // the session itself, its namespace and its requests
	partMessages        // messages and jobs until they are answered, and their answers until they are sent
	partLeases
	partRegions // tables of registered pages
)

// LeastMemory is what each session can hold whatever the others do.
const LeastMemory = 512 << 10

// MemoryBudget divides the host's memory among its sessions: limit is all of it, and own what the host has taken for
// itself.
func MemoryBudget(limit, own int64, sessions int) (*budget.Budget, error) {
	return budget.New(budget.Config{
		Of: "memory", Limit: limit, Own: own, Holders: sessions, Least: LeastMemory,
		Parts:  []string{"sessions", "messages", "leases", "regions"},
		Advice: "wait for jobs and release leases, or ask the operator for more (max_memory)",
	})
}

// DescriptorBudget divides the process's file descriptors, of which roots and connections need the other half.
func DescriptorBudget(sessions int) *budget.Budget {
	var files unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &files) // cannot fail: the pointer is good
	return some(budget.Config{
		Of: "file descriptors", Limit: int64(min(files.Cur, 1<<40) / 2), Holders: sessions, Parts: []string{"descriptors"},
		Advice: "send REGISTER for those that wait, or ask the operator for more (the process's limit of open files)",
	})
}

// RoomBudget divides the room on disk that stores may reserve while they wait: half of the roots' capacity. In a small root a
// share is less than a chunk, so each session's first is not held to it.
func RoomBudget(capacity int64, sessions int) *budget.Budget {
	return some(budget.Config{
		Of: "room", Limit: capacity / 2, Holders: sessions, Parts: []string{"waiting"}, First: true,
		Advice: "let semaphores of other stores come first",
	})
}

// some makes a budget of at least a little. Then nothing can be wrong with it: no holder needs a part of its own.
func some(c budget.Config) *budget.Budget {
	c.Limit = max(c.Limit, 16)
	b, _ := budget.New(c)
	return b
}
