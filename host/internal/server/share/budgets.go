package share

import (
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/budget"
)

// Budgets are what sessions share.
type Budgets struct {
	Memory      *budget.Budget // bytes
	Descriptors *budget.Budget // that wait for a message
	Room        *budget.Budget // bytes on disk
	Arriving    *budget.Budget // bytes of messages that no session has yet, by connection

	said atomic.Int64 // when a refusal was logged last, in nanoseconds
}

// Refused logs for the operator who holds most, once a second at most: a client learns its own figures only.
func (b *Budgets) Refused(log *slog.Logger, err error) {
	if f := b.Memory.Figures(3); b.says() {
		log.Warn("message refused: the session's share is used up", "error", err, "held", f.Held, "sessions", f.Holders, "most", f.Most)
	}
}

// Closed logs that a connection was closed because of what arrived on it, as Refused does.
func (b *Budgets) Closed(log *slog.Logger, err error) {
	if f := b.Arriving.Figures(3); b.says() {
		log.Warn("connection closed: more arrives than its share", "error", err, "held", f.Held, "connections", f.Holders, "most", f.Most)
	}
}

func (b *Budgets) says() bool {
	now := time.Now().UnixNano()
	last := b.said.Load()
	return now-last >= int64(time.Second) && b.said.CompareAndSwap(last, now)
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

// Arriving is the part of what staging leaves of a limit that is for messages which no session has yet.
func Arriving(limit, staging int64) int64 { return max(0, limit-staging) / 8 }

// moreConnections are those that have no session: of people, of readers of events and Status.
const moreConnections = 64

// ArrivingBudget divides the memory of messages that come among connections.
func ArrivingBudget(limit int64, sessions int) *budget.Budget {
	return some(budget.Config{
		Of: "memory of messages that are not complete", Limit: limit, Holders: sessions + moreConnections, Parts: []string{"arriving"},
		Advice: "send smaller messages, and each one whole, or ask the operator for more (max_memory)",
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
