package budget

import (
	"cmp"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Sessions are what sessions share.
type Sessions struct {
	Memory      *Budget      // bytes
	Descriptors *Budget      // that wait for a message, or are of pieces between the steps of a load
	Mappings    *Budget      // of clients' files
	Room        *Budget      // bytes on disk
	Leased      *Budget      // bytes of entries that leases hold
	Arriving    *Budget      // bytes that connections hold and no session, by connection
	Passing     *Connections // of the descriptor socket
	HTTP        *Connections
	Processors  float64 // of which a tenant among others has half

	pace pace
	said atomic.Int64 // when a refusal was logged last, in nanoseconds
}

// Refused logs for the operator who holds most, once a second at most: a client learns its own figures only.
func (b *Sessions) Refused(log *slog.Logger, err error) {
	if b.says() {
		f := b.Memory.Figures(3)
		log.Warn("message refused: the session's share is used up", "error", err, "held", f.Held, "sessions", f.Holders, "most", f.Most)
	}
}

// Ended counts, and logs as Refused does, that a lease ended because its tenant holds most of a root.
func (b *Sessions) Ended(log *slog.Logger, tenant uint32) {
	b.Leased.mu.Lock()
	b.Leased.refused++
	b.Leased.mu.Unlock()
	if b.says() {
		log.Warn("leases end early: there are leases on most of a root, and their tenant has most of these", "tenant", tenant,
			"most", b.Leased.Figures(3).Most)
	}
}

// Closed logs that a connection was closed because of what arrived on it, as Refused does.
func (b *Sessions) Closed(log *slog.Logger, err error) {
	if b.says() {
		f := b.Arriving.Figures(3)
		log.Warn("connection closed: more arrives than its share", "error", err, "held", f.Held, "connections", f.Holders, "most", f.Most)
	}
}

// Figures are those of all that is bounded, each with at most so many holders. What connections hold is a part of the memory.
func (b *Sessions) Figures(most int) []Figures {
	memory, arriving := b.Memory.Figures(most), b.Arriving.Figures(most)
	memory.Own = max(0, memory.Own-arriving.Limit)
	memory.Held += arriving.Held
	memory.Refused += arriving.Refused
	maps.Copy(memory.Parts, arriving.Parts)
	memory.Most = append(memory.Most, arriving.Most...)
	slices.SortStableFunc(memory.Most, func(a, c Share) int { return cmp.Compare(c.Held, a.Held) })
	memory.Most = memory.Most[:min(most, len(memory.Most))]
	return []Figures{
		memory, b.Descriptors.Figures(most), b.Mappings.Figures(most), b.Room.Figures(most), b.Leased.Figures(most),
		b.Passing.Figures(), b.HTTP.Figures(),
	}
}

func (b *Sessions) says() bool {
	now := time.Now().UnixNano()
	last := b.said.Load()
	return now-last >= int64(time.Second) && b.said.CompareAndSwap(last, now)
}

// Parts of descriptors.
const (
	partWaiting = iota // for their message
	partPieces
)

// Parts of the memory of connections.
const (
	partArriving = iota
	partEvents   // streams of events, or calls of other hosts
	partAnswers  // that are not written yet
	partLines    // connections of other hosts themselves

	partCalls = partEvents
)

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

// OfArriving divides the memory of connections that is no session's among them: of messages that come, and of streams of events.
func OfArriving(limit int64, sessions int) *Budget {
	return some(Config{
		Of: "memory of connections", Limit: limit, Holders: int(min(int64(sessions+moreConnections), openFiles()/8)),
		Half: true, Parts: []string{"arriving", "events", "answers"},
		Advice: "send smaller messages, each one whole, read fewer streams, read answers, or ask the operator for more (max_memory)",
	})
}

// PeersLine is what a budget of peers has for each connection: half of it is the connection's own, and the other half can be borrowed.
const PeersLine = 512 << 10

// OfPeers divides memory among the connections of other hosts.
func OfPeers(limit int64) *Budget {
	return some(Config{
		Of: "memory of peers", Limit: limit, Holders: int(limit / PeersLine), Parts: []string{"arriving", "calls", "answers", "connections"},
		Advice: "read answers, and make fewer calls at a time",
	})
}

// Stream takes the memory of a stream of events, or says why the connection may not have one more.
func (h *Holder) Stream() error { return h.Take(partEvents, streamBytes) }

func (h *Holder) StreamOver() { h.Give(partEvents, streamBytes) }

// Answer takes the memory of an answer, or says why the connection may not have one more before it reads others.
func (h *Holder) Answer(bytes int64) error { return h.Take(partAnswers, bytes) }

func (h *Holder) AnswerOver(bytes int64) { h.Give(partAnswers, bytes) }

// Arrive takes the memory of what has come, and that no handler has read.
func (h *Holder) Arrive(bytes int64) error { return h.Take(partArriving, bytes) }

func (h *Holder) ArriveOver(bytes int64) { h.Give(partArriving, bytes) }

// Call takes the memory of a call of another host, or says why the connection may not have one more.
func (h *Holder) Call(bytes int64) error { return h.Take(partCalls, bytes) }

func (h *Holder) CallOver(bytes int64) { h.Give(partCalls, bytes) }

// Line takes the memory of another host's connection itself.
func (h *Holder) Line(bytes int64) error { return h.Take(partLines, bytes) }

func (h *Holder) LineOver(bytes int64) { h.Give(partLines, bytes) }

// openFiles is how many files the process may have open. Sessions have 7 of 32 of them (OfDescriptors), their connections 4
// (OfArriving), and those of the descriptor socket and of HTTP one each (newConnections). More than half is for the store, which
// must be able to open its own files whatever clients do.
func openFiles() int64 {
	var files unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &files) // cannot fail: the pointer is good
	return int64(min(files.Cur, 1<<40))
}

// OfDescriptors divides the part of the process's file descriptors that sessions have.
func OfDescriptors(sessions int) *Budget {
	files := openFiles()
	return some(Config{
		Of: "file descriptors", Limit: files, Own: files - files*7/32, Holders: sessions, Parts: []string{"waiting", "pieces"},
		Advice: "send REGISTER for those that wait, or ask the operator for more (the process's limit of open files)",
	})
}

// OfMappings divides half of the mappings that the kernel lets the process have. It cannot live without the others: its own
// memory takes them.
func OfMappings(sessions int) *Budget {
	limit := int64(65530) // the kernel's default
	if text, err := os.ReadFile("/proc/sys/vm/max_map_count"); err == nil {
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			limit = n
		}
	}
	return some(Config{
		Of: "mappings", Limit: limit, Own: limit / 2, Holders: sessions, Parts: []string{"files"},
		Advice: "share fewer and larger files, or ask the operator for more (vm.max_map_count)",
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

// OfLeased counts the bytes that leases hold in the roots, an entry as often as leases hold it.
func OfLeased(capacity int64, sessions int) *Budget {
	return some(Config{
		Of: "leased bytes", Limit: capacity, Holders: sessions, Parts: []string{"entries"}, First: true,
	})
}

// some makes a budget of at least a little. Then nothing can be wrong with it: no holder needs a part of its own.
func some(c Config) *Budget {
	c.Limit = max(c.Limit, c.Own+16)
	b, _ := New(c)
	return b
}
