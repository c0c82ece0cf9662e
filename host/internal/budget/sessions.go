package budget

import (
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Sessions are what sessions share.
type Sessions struct {
	Memory      *Budget // bytes
	Descriptors *Budget // that wait for a message
	Room        *Budget // bytes on disk
	Arriving    *Budget // bytes of messages that no session has yet, by connection

	said atomic.Int64 // when a refusal was logged last, in nanoseconds
}

// Refused logs for the operator who holds most, once a second at most: a client learns its own figures only.
func (b *Sessions) Refused(log *slog.Logger, err error) {
	if f := b.Memory.Figures(3); b.says() {
		log.Warn("message refused: the session's share is used up", "error", err, "held", f.Held, "sessions", f.Holders, "most", f.Most)
	}
}

// Closed logs that a connection was closed because of what arrived on it, as Refused does.
func (b *Sessions) Closed(log *slog.Logger, err error) {
	if f := b.Arriving.Figures(3); b.says() {
		log.Warn("connection closed: more arrives than its share", "error", err, "held", f.Held, "connections", f.Holders, "most", f.Most)
	}
}

func (b *Sessions) says() bool {
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

// OfMemory divides the host's memory among its sessions: limit is all of it, and own what the host has taken for
// itself.
func OfMemory(limit, own int64, sessions int) (*Budget, error) {
	return New(Config{
		Of: "memory", Limit: limit, Own: own, Holders: sessions, Least: LeastMemory,
		Parts:  []string{"sessions", "messages", "leases", "regions"},
		Advice: "wait for jobs and release leases, or ask the operator for more (max_memory)",
	})
}

// ArrivingPart is the part of what staging leaves of a limit that is for messages which no session has yet.
func ArrivingPart(limit, staging int64) int64 { return max(0, limit-staging) / 8 }

// moreConnections are those that have no session: of people, of readers of events and Status.
const moreConnections = 64

// OfArriving divides the memory of messages that come among connections.
func OfArriving(limit int64, sessions int) *Budget {
	return some(Config{
		Of: "memory of messages that are not complete", Limit: limit, Holders: sessions + moreConnections, Parts: []string{"arriving"},
		Advice: "send smaller messages, and each one whole, or ask the operator for more (max_memory)",
	})
}

// OfDescriptors divides the process's file descriptors, of which roots and connections need the other half.
func OfDescriptors(sessions int) *Budget {
	var files unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &files) // cannot fail: the pointer is good
	return some(Config{
		Of: "file descriptors", Limit: int64(min(files.Cur, 1<<40) / 2), Holders: sessions, Parts: []string{"descriptors"},
		Advice: "send REGISTER for those that wait, or ask the operator for more (the process's limit of open files)",
	})
}

// OfRoom divides the room on disk that stores may reserve while they wait: half of the roots' capacity. In a small root a
// share is less than a chunk, so each session's first is not held to it.
func OfRoom(capacity int64, sessions int) *Budget {
	return some(Config{
		Of: "room", Limit: capacity / 2, Holders: sessions, Parts: []string{"waiting"}, First: true,
		Advice: "let semaphores of other stores come first",
	})
}

// some makes a budget of at least a little. Then nothing can be wrong with it: no holder needs a part of its own.
func some(c Config) *Budget {
	c.Limit = max(c.Limit, 16)
	b, _ := New(c)
	return b
}
