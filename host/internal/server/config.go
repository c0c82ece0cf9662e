package server

import (
	"log/slog"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/budget"
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
	// Memory is what all sessions together may make the host hold, as of [budget.OfMemory]. nil: DefaultMemory.
	Memory *budget.Budget
	// Arriving is the same for messages that no session has yet, as of [budget.OfArriving]. nil: of an eighth of DefaultMemory.
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

// Defaults.
const (
	DefaultMemory       = 2 << 30
	DefaultLeaseTTL     = time.Minute
	DefaultMaxWait      = time.Minute
	DefaultHelloTimeout = 10 * time.Second
	DefaultSlowTimeout  = 10 * time.Second
)

// DefaultLimits returns limits that are generous for an engine and still bound a broken client.
func DefaultLimits() Limits {
	return Limits{
		KeysPerLookup: 1 << 16,
		ChunksPerJob:  1 << 12,
		MessageBytes:  16 << 20,
		Sessions:      1024,
		Jobs:          1 << 12,
		Leases:        1 << 16,
		Requests:      1 << 16,
		SessionArena:  1 << 42,
		ArenaBytes:    1 << 43,
		Descriptors:   1 << 12, // a GPU's memory may come in several thousand segments
		Outgoing:      1 << 12,
	}
}

// orDefaults returns c with every unset limit and time filled in.
func (c Config) orDefaults() Config {
	d := DefaultLimits()
	for _, f := range []struct{ have, def *int }{
		{&c.Limits.KeysPerLookup, &d.KeysPerLookup}, {&c.Limits.ChunksPerJob, &d.ChunksPerJob},
		{&c.Limits.MessageBytes, &d.MessageBytes}, {&c.Limits.Sessions, &d.Sessions}, {&c.Limits.Jobs, &d.Jobs},
		{&c.Limits.Leases, &d.Leases}, {&c.Limits.Requests, &d.Requests}, {&c.Limits.Descriptors, &d.Descriptors},
		{&c.Limits.Outgoing, &d.Outgoing},
	} {
		if *f.have <= 0 {
			*f.have = *f.def
		}
	}
	if c.Limits.SessionArena <= 0 {
		c.Limits.SessionArena = d.SessionArena
	}
	if c.Limits.ArenaBytes <= 0 {
		c.Limits.ArenaBytes = d.ArenaBytes
	}
	for _, f := range []struct {
		have *time.Duration
		def  time.Duration
	}{{&c.LeaseTTL, DefaultLeaseTTL}, {&c.MaxWait, DefaultMaxWait}, {&c.HelloTimeout, DefaultHelloTimeout}, {&c.SlowTimeout, DefaultSlowTimeout}} {
		if *f.have <= 0 {
			*f.have = f.def
		}
	}
	if c.Capacity <= 0 {
		c.Capacity = 1 << 60
	}
	if c.Memory == nil {
		c.Memory, _ = budget.OfMemory(max(DefaultMemory, 2*budget.LeastMemory*int64(c.Limits.Sessions)), 0, c.Limits.Sessions) // large enough
	}
	if c.Arriving == nil {
		c.Arriving = budget.OfArriving(budget.ArrivingPart(DefaultMemory, 0), c.Limits.Sessions)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}
