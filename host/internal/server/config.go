package server

import (
	"log/slog"
	"runtime"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/peers"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// Config configures a server. Zero limits and times are the defaults.
type Config struct {
	Store  *store.Store
	Engine *transfer.Engine
	// GPUs are those of which sessions may register memory. The engine knows them too. They outlive the server.
	GPUs   []*gds.GPU
	Log    *slog.Logger
	Limits Limits
	// Memory is what all sessions together may make the host hold, as of [budget.OfMemory]. nil: defaultMemory.
	Memory *budget.Budget
	// Arriving is the same for messages that no session has yet, as of [budget.OfArriving]. nil: of an eighth of defaultMemory.
	Arriving *budget.Budget
	// Capacity is that of all roots. 0: there is no limit of what stores that wait may reserve.
	Capacity int64
	// Levels is how many the store has.
	Levels int
	// LeaseTTL is how long a lease pins its entries unless it is loaded or released.
	LeaseTTL time.Duration
	// MaxWait is how long a job may wait for a semaphore of its client.
	MaxWait time.Duration
	// HelloTimeout is how long a stream may exist without an accepted HELLO.
	HelloTimeout time.Duration
	// SlowTimeout is how long a session's outgoing queue may stay over its limit.
	SlowTimeout time.Duration
	// Version is the host's version, for HELLO and Status.
	Version string
	// Pins are namespace fields, by their names in the namespace's text, that every session must agree with.
	Pins Pins
	// Info returns the part of Status that the server does not know. Optional.
	Info func() *proto.StatusResponse
	// Users may connect, besides root and the host's own user.
	Users socket.Users
	// Rules say which tenants users may be, and what those see.
	Rules socket.Rules
	// Admin implements the admin service. Optional.
	Admin proto.AdminServiceServer
	// Peers may have what a lookup misses. Optional.
	Peers *peers.Peers
	// Spans makes spans of requests. Optional.
	Spans *RequestSpans
}

// Limits bound what one client, and all clients together, can make the host hold.
type Limits struct {
	KeysPerLookup int
	ChunksPerJob  int
	MessageBytes  int
	Sessions      int
	Jobs          int   // per session at a time
	Leases        int   // per session at a time
	Requests      int   // per session, not ended
	SessionArena  int64 // bytes mapped for one session
	ArenaBytes    int64 // bytes mapped for all sessions
	Descriptors   int   // per session, received and not named by a message yet
	Outgoing      int   // messages queued for a session before it stops reading
}

func (l *Limits) checkKeys(n int) error {
	if n > l.KeysPerLookup {
		return faultf(proto.Code_CODE_LIMIT, "keys", "%d, at most %d in one message", n, l.KeysPerLookup)
	}
	return nil
}

func (l *Limits) checkChunks(n int) error {
	if n == 0 {
		return invalid("chunks", "none")
	}
	if n > l.ChunksPerJob {
		return faultf(proto.Code_CODE_LIMIT, "chunks", "%d, at most %d in one job", n, l.ChunksPerJob)
	}
	return nil
}

// Defaults of limits that bytes are derived from.
const (
	defaultMemory = 2 << 30
	defaultKeys   = 1 << 16
	defaultChunks = 1 << 12
)

// orDefaults returns c with every unset limit and time filled in. The limits are generous for an engine and still bound a
// broken client.
func (c Config) orDefaults() Config {
	l := &c.Limits
	orDefault(&l.KeysPerLookup, defaultKeys)
	orDefault(&l.ChunksPerJob, defaultChunks)
	orDefault(&l.MessageBytes, 16<<20)
	orDefault(&l.Sessions, 1024)
	orDefault(&l.Jobs, 1<<12)
	orDefault(&l.Leases, 1<<16)
	orDefault(&l.Requests, 1<<16)
	orDefault(&l.SessionArena, 1<<42)
	orDefault(&l.ArenaBytes, 1<<43)
	orDefault(&l.Descriptors, 1<<12) // a GPU's memory may come in several thousand segments
	orDefault(&l.Outgoing, 1<<12)
	orDefault(&c.LeaseTTL, time.Minute)
	orDefault(&c.MaxWait, time.Minute)
	orDefault(&c.HelloTimeout, 10*time.Second)
	orDefault(&c.SlowTimeout, 10*time.Second)
	orDefault(&c.Capacity, 1<<60)
	if c.Memory == nil {
		c.Memory, _ = budget.OfMemory(max(defaultMemory, 2*budget.LeastMemory*int64(l.Sessions)), 0, l.Sessions) // large enough
	}
	if c.Arriving == nil {
		c.Arriving = budget.OfArriving(budget.ArrivingPart(defaultMemory, 0), l.Sessions)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

func orDefault[T int | int64 | time.Duration](have *T, value T) {
	if *have <= 0 {
		*have = value
	}
}

// budgets are what the sessions of a configuration share.
func (c *Config) budgets() budget.Sessions {
	return budget.Sessions{
		Memory: c.Memory, Arriving: c.Arriving, Descriptors: budget.OfDescriptors(c.Limits.Sessions),
		Room: budget.OfRoom(c.Capacity, c.Limits.Sessions), Leased: budget.OfLeased(c.Capacity, c.Limits.Sessions),
		Mappings: budget.OfMappings(c.Limits.Sessions), Passing: budget.OfPassing(), HTTP: budget.OfHTTP(),
		Processors: float64(runtime.GOMAXPROCS(0)),
	}
}
