package server

import (
	"cmp"
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

// Config configures a server. A limit or time of 0 means its default.
type Config struct {
	Store  *store.Store
	Engine *transfer.Engine
	// GPUs are the GPUs from which clients may register memory. Engine must know them, too. They must outlive the server.
	GPUs   []*gds.GPU
	Log    *slog.Logger
	Limits Limits
	// Memory limits the memory that all sessions together may occupy: see [budget.OfMemory]. nil means defaultMemory.
	Memory *budget.Budget
	// Arriving limits the memory of messages that have not reached a session yet: see [budget.OfArriving]. nil means an eighth
	// of defaultMemory.
	Arriving *budget.Budget
	// Capacity is the capacity of all roots in bytes. It limits the reservations of waiting stores. 0 means no limit.
	Capacity int64
	// Levels is the number of levels of the store.
	Levels int
	// LeaseTTL is the time for which a lease pins its entries if it is neither loaded nor released.
	LeaseTTL time.Duration
	// MaxWait is the longest time that a job may wait for a semaphore of its client.
	MaxWait time.Duration
	// HelloTimeout is the time within which a new stream must send an accepted HELLO.
	HelloTimeout time.Duration
	// SlowTimeout is the time for which the outgoing queue of a session may stay over its limit.
	SlowTimeout time.Duration
	// Version is the host's version. HELLO and Status return it.
	Version string
	// Pins are namespace fields that every session must match. The keys are the field names in the namespace's text form.
	Pins Pins
	// Info returns the part of Status that the server does not know. It may be nil.
	Info func() *proto.StatusResponse
	// Users are the users that may connect, in addition to root and the host's own user.
	Users socket.Users
	// Rules define which users may act for which tenants, and which entries a tenant sees.
	Rules socket.Rules
	// Admin implements the admin service. It may be nil.
	Admin proto.AdminServiceServer
	// Peers are asked for entries that a lookup misses. It may be nil.
	Peers *peers.Peers
	// Spans records spans of requests. It may be nil.
	Spans *RequestSpans
}

// Limits bound the resources that one client, or all clients together, can make the host hold.
type Limits struct {
	KeysPerLookup int
	ChunksPerJob  int
	MessageBytes  int
	Sessions      int
	Jobs          int   // per session at a time
	Leases        int   // per session at a time
	Requests      int   // per session, not ended yet
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

// Defaults from which limits in bytes are derived.
const (
	defaultMemory = 2 << 30
	defaultKeys   = 1 << 16
	defaultChunks = 1 << 12
)

// orDefaults returns c with a default for every unset limit and time. The defaults are generous for an engine, and still bound
// a broken client.
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
	orDefault(&l.Descriptors, 1<<12) // the memory of a GPU may come in several thousand segments
	orDefault(&l.Outgoing, 1<<12)
	orDefault(&c.LeaseTTL, time.Minute)
	orDefault(&c.MaxWait, time.Minute)
	orDefault(&c.HelloTimeout, 10*time.Second)
	orDefault(&c.SlowTimeout, 10*time.Second)
	orDefault(&c.Capacity, 1<<60)
	if c.Memory == nil {
		c.Memory, _ = budget.OfMemory(max(defaultMemory, 2*budget.LeastMemory*int64(l.Sessions)), 0, l.Sessions) // cannot fail: the memory is large enough
	}
	if c.Arriving == nil {
		c.Arriving = budget.OfArriving(budget.ArrivingPart(defaultMemory, 0), l.Sessions)
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	return c
}

func orDefault[T int | int64 | time.Duration](have *T, value T) {
	if *have <= 0 {
		*have = value
	}
}

// budgets returns the budgets that all sessions share.
func (c *Config) budgets() budget.Sessions {
	return budget.Sessions{
		Memory: c.Memory, Arriving: c.Arriving, Descriptors: budget.OfDescriptors(c.Limits.Sessions),
		Room: budget.OfRoom(c.Capacity, c.Limits.Sessions), Leased: budget.OfLeased(c.Capacity, c.Limits.Sessions),
		Mappings: budget.OfMappings(c.Limits.Sessions), Passing: budget.OfPassing(), HTTP: budget.OfHTTP(),
		Processors: float64(runtime.GOMAXPROCS(0)),
	}
}
