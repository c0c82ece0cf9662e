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

// Sessions holds the budgets that all sessions share.
type Sessions struct {
	Memory      *Budget      // bytes
	Descriptors *Budget      // descriptors that wait for a message, or that a load keeps between its steps
	Mappings    *Budget      // mappings of clients' files
	Room        *Budget      // bytes on disk reserved by stores that wait
	Leased      *Budget      // bytes of leased entries
	Arriving    *Budget      // bytes held by connections and not by a session, by connection
	Passing     *Connections // connections of the descriptor socket
	HTTP        *Connections
	Processors  float64 // number of processors, of which a tenant gets half while others are active

	pace pace
	said atomic.Int64 // time of the last logged refusal in nanoseconds
}

// Refused logs a refusal with the largest holders, at most once a second. The operator needs them, because a client learns its
// own figures only.
func (b *Sessions) Refused(log *slog.Logger, err error) {
	if b.says() {
		f := b.Memory.Figures(3)
		log.Warn("message refused: the session's share is used up", "error", err, "held", f.Held, "sessions", f.Holders, "most", f.Most)
	}
}

// Ended counts a lease that ended because its tenant holds most of a root, and logs it as Refused does.
func (b *Sessions) Ended(log *slog.Logger, tenant uint32) {
	b.Leased.mu.Lock()
	b.Leased.refused++
	b.Leased.mu.Unlock()
	if b.says() {
		log.Warn("leases end early: there are leases on most of a root, and their tenant has most of these", "tenant", tenant,
			"most", b.Leased.Figures(3).Most)
	}
}

// Closed logs that a connection was closed because too much arrived on it, as Refused does.
func (b *Sessions) Closed(log *slog.Logger, err error) {
	if b.says() {
		f := b.Arriving.Figures(3)
		log.Warn("connection closed: more arrives than its share", "error", err, "held", f.Held, "connections", f.Holders, "most", f.Most)
	}
}

// Figures returns the state of all budgets, each with at most the given number of holders. The budget of memory includes the
// memory of connections.
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
	partWaiting = iota // descriptors that wait for their message
	partPieces
)

// Parts of the memory of connections.
const (
	partArriving = iota
	partEvents   // streams of events, or calls of other hosts
	partAnswers  // answers that are not written yet
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

// LeastMemory is the memory that each session can hold regardless of the others.
const LeastMemory = 512 << 10

// OfMemory divides the host's memory among its sessions. limit is the whole memory, and own is the host's own part.
func OfMemory(limit, own int64, sessions int) (*Budget, error) {
	return New(Config{
		Of: "memory", Limit: limit, Own: own, Holders: sessions, Least: LeastMemory,
		Parts:  []string{"sessions", "messages", "leases", "regions"},
		Advice: "wait for jobs and release leases, or ask the operator for more (max_memory)",
	})
}

// ArrivingPart returns the part of a limit that is for messages that have not reached a session yet: an eighth of the rest
// after staging.
func ArrivingPart(limit, staging int64) int64 { return max(0, limit-staging) / 8 }

// moreConnections is the number of connections without a session: those of people, and of readers of events and Status.
const moreConnections = 64

// OfArriving divides the memory of connections that belongs to no session among the connections. It is used for arriving
// messages and for streams of events.
func OfArriving(limit int64, sessions int) *Budget {
	return some(Config{
		Of: "memory of connections", Limit: limit, Holders: int(min(int64(sessions+moreConnections), openFiles()/8)),
		Half: true, Parts: []string{"arriving", "events", "answers"},
		Advice: "send smaller messages, each one whole, read fewer streams, read answers, or ask the operator for more (max_memory)",
	})
}

// PeersLine is the part of a budget of peers for each connection. Half of it is reserved for the connection, and the other half
// can be borrowed.
const PeersLine = 512 << 10

// OfPeers divides memory among the connections of other hosts.
func OfPeers(limit int64) *Budget {
	return some(Config{
		Of: "memory of peers", Limit: limit, Holders: int(limit / PeersLine), Parts: []string{"arriving", "calls", "answers", "connections"},
		Advice: "read answers, and make fewer calls at a time",
	})
}

// Stream charges a stream of events. It fails if the connection may not have another one.
func (h *Holder) Stream() error { return h.Take(partEvents, streamBytes) }

func (h *Holder) StreamOver() { h.Give(partEvents, streamBytes) }

// Answer charges an answer. It fails if the connection must read earlier answers first.
func (h *Holder) Answer(bytes int64) error { return h.Take(partAnswers, bytes) }

func (h *Holder) AnswerOver(bytes int64) { h.Give(partAnswers, bytes) }

// Arrive charges arrived bytes that no handler has read.
func (h *Holder) Arrive(bytes int64) error { return h.Take(partArriving, bytes) }

func (h *Holder) ArriveOver(bytes int64) { h.Give(partArriving, bytes) }

// Call charges a call of another host. It fails if the connection may not have another one.
func (h *Holder) Call(bytes int64) error { return h.Take(partCalls, bytes) }

func (h *Holder) CallOver(bytes int64) { h.Give(partCalls, bytes) }

// Line charges the connection of another host.
func (h *Holder) Line(bytes int64) error { return h.Take(partLines, bytes) }

func (h *Holder) LineOver(bytes int64) { h.Give(partLines, bytes) }

// openFiles returns the maximum number of open files of the process. Of 32 parts, sessions have 7 (OfDescriptors), their
// connections 4 (OfArriving), and the descriptor socket and HTTP one each (newConnections). More than half is left for the
// store, which must always be able to open its own files.
func openFiles() int64 {
	var files unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &files) // cannot fail: the pointer is good
	return int64(min(files.Cur, 1<<40))
}

// OfDescriptors divides the sessions' part of the process's file descriptors.
func OfDescriptors(sessions int) *Budget {
	files := openFiles()
	return some(Config{
		Of: "file descriptors", Limit: files, Own: files - files*7/32, Holders: sessions, Parts: []string{"waiting", "pieces"},
		Advice: "send REGISTER for those that wait, or ask the operator for more (the process's limit of open files)",
	})
}

// OfMappings divides half of the mappings that the kernel permits the process. The process needs the other half for its own
// memory.
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

// OfRoom divides the room on disk that stores may reserve while they wait: half of the roots' capacity. In a small root a share
// is less than a chunk, so the first chunk of each session may exceed the share.
func OfRoom(capacity int64, sessions int) *Budget {
	return some(Config{
		Of: "room", Limit: capacity / 2, Holders: sessions, Parts: []string{"waiting"}, First: true,
		Advice: "let semaphores of other stores come first",
	})
}

// OfLeased counts the bytes that leases hold in the roots. An entry counts once for each lease.
func OfLeased(capacity int64, sessions int) *Budget {
	return some(Config{
		Of: "leased bytes", Limit: capacity, Holders: sessions, Parts: []string{"entries"}, First: true,
	})
}

// some returns a budget of at least a few units. It cannot fail, because the configuration demands no least amount for a
// holder.
func some(c Config) *Budget {
	c.Limit = max(c.Limit, c.Own+16)
	b, _ := New(c)
	return b
}
