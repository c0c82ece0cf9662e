package server

import (
	"log/slog"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/transfer"
)

// Config is what a server needs. Zero limits and times mean the defaults.
type Config struct {
	Store  *store.Store
	Engine *transfer.Engine
	// GPUs are those whose memory sessions may register; the engine knows them too. They outlive the server.
	GPUs   []*gds.GPU
	Log    *slog.Logger
	Limits Limits
	// LeaseTTL is how long a lease pins its entries when nobody loads or releases it.
	LeaseTTL time.Duration
	// HelloTimeout is how long a stream may stay without an accepted HELLO.
	HelloTimeout time.Duration
	// SlowTimeout is how long a session's outgoing queue may stay over its limit.
	SlowTimeout time.Duration
	// Version is the host's, for HELLO and Status.
	Version string
	// Pins are namespace fields, named as in the namespace's text, that every session must agree with.
	Pins map[string]string
	// Info makes the part of Status that the server does not know itself. Optional.
	Info func() *proto.StatusReply
	// Admin changes how the host runs. Optional.
	Admin proto.AdminServer
}

// Limits bound what one client, and all of them, can make the host hold.
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
	Descriptors   int   // per session, sent and not yet named by a REGISTER
	Outgoing      int   // messages queued for a session before its reader stops
}

func (l *Limits) checkKeys(n int) error {
	if n > l.KeysPerLookup {
		return faultf(proto.Code_CODE_LIMIT, "keys", "%d, at most %d in one LOOKUP", n, l.KeysPerLookup)
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
	DefaultLeaseTTL     = time.Minute
	DefaultHelloTimeout = 10 * time.Second
	DefaultSlowTimeout  = 10 * time.Second
)

// DefaultLimits are generous for an engine and still bound a broken client.
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
		Descriptors:   1 << 12, // a GPU's memory may come in some thousand segments
		Outgoing:      1 << 12,
	}
}

// orDefaults fills every limit and time that is not set.
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
	}{{&c.LeaseTTL, DefaultLeaseTTL}, {&c.HelloTimeout, DefaultHelloTimeout}, {&c.SlowTimeout, DefaultSlowTimeout}} {
		if *f.have <= 0 {
			*f.have = f.def
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}
