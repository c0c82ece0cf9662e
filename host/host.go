package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/devices"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/peers"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/server"
	"github.com/kvhost/kvhost/host/internal/spans"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// Config is what [New] makes a host from.
type Config struct {
	Config  *config.Config // validated
	Log     *slog.Logger
	Version string // told to clients
	// Memory is the size of a root in memory before those of Config ([config.Config.WithMemory]); 0: none.
	Memory int64
	// Load reads the configuration again, for [Host.Reread]; nil: there is nothing to read. Level follows it, unless it is nil.
	Load  func() (*config.Config, error)
	Level *slog.LevelVar
	// Speeds is asked with compression = "auto" in place of what is measured; for tests.
	Speeds func() codec.Speeds
}

// Host is a running kvhost.
type Host struct {
	cfg      *config.Config                // as the host started
	live     atomic.Pointer[config.Config] // as it was reloaded last
	memory   int64                         // of the root before those of the configuration
	log      *slog.Logger
	policies *policyset.Set
	devices  *devices.Devices
	peers    *peers.Peers // nil when off
	store    *store.Store
	engine   *transfer.Engine
	server   *server.Server
	http     *observe.Server // nil when off
	spans    *spans.Tracer
	traced   *server.RequestSpans
	version  string
	speeds   func() codec.Speeds

	load      func() (*config.Config, error)
	level     *slog.LevelVar
	reloads   observe.Reloads
	reloading sync.Mutex // held during Reload
	closeOnce sync.Once
	closeErr  error
}

// New opens the policies and the store, and binds the HTTP listener. It serves nothing yet. ctx bounds the opening.
func New(ctx context.Context, cfg Config) (_ *Host, err error) {
	h := &Host{cfg: cfg.Config.WithMemory(cfg.Memory), memory: cfg.Memory, version: cfg.Version, log: cfg.Log, speeds: cfg.Speeds,
		load: cfg.Load, level: cfg.Level}
	h.live.Store(h.cfg)
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	if h.load == nil {
		h.load = func() (*config.Config, error) {
			return nil, fmt.Errorf("%w: there is no configuration to read", ErrRestart)
		}
	}
	h.log = slog.New(limitLog(h.log.Handler(), sandbox.LogMessage, logReloaded, logRefused))
	defer func() {
		if err != nil {
			err = errors.Join(err, h.Close())
		}
	}()
	if h.policies, err = policyset.Open(ctx, h.cfg, h.log); err != nil {
		return nil, err
	}
	if h.devices, err = devices.Open(h.cfg, h.log); err != nil {
		return nil, err
	}
	fsys := h.devices.FileSystem()
	if h.peers, err = openPeers(h.cfg, h.log); err != nil {
		return nil, err
	}
	if h.store, err = store.Open(ctx, h.storeConfig(h.cfg, h.policies.Bound())); err != nil {
		return nil, err
	}
	h.policies.Attach(h.store)
	if h.engine, err = h.newEngine(); err != nil {
		return nil, err
	}
	pinners := h.peers.Pinners()
	if err := h.devices.OpenGPUs(h.engine, h.store.AwaitLoads, pinners...); err != nil {
		return nil, err
	}
	for _, p := range pinners { // after the GPUs, near which the slots are
		if err := h.engine.Register(p); err != nil {
			return nil, err
		}
	}
	for _, c := range certificates(h.cfg) {
		if _, says := c.judge(time.Now()); says != "" {
			h.log.Warn("certificate", "setting", c.setting, "state", says)
		}
	}
	if h.traced, err = h.openSpans(ctx); err != nil {
		return nil, err
	}
	sessions, err := h.serverConfig(h.cfg)
	if err != nil {
		return nil, err
	}
	h.server = server.New(sessions)
	if h.peers != nil {
		h.peers.Start(h.store)
	}
	if h.cfg.HTTP.Listen != "" {
		registry := observe.NewRegistry(observe.Host{Store: h.store, Engine: h.engine, Server: h.server,
			GPUs: h.devices.GPUs(), Memory: h.devices.Memory(), Buckets: h.devices.Buckets(), PolicyMemory: h.policies.Memory(),
			Peers: h.peers, Version: cfg.Version, Spans: h.spans, Reloads: &h.reloads, Certificates: h.certificateEnds})
		w := httpConfig(h.cfg)
		w.Registry, w.Status, w.Connections, w.Log = registry, h.server.Status, h.server.HTTPConnections(), h.log
		if h.http, err = observe.Listen(w); err != nil {
			return nil, err
		}
	}
	h.devices.OpenRoutes(h.engine, h.store, fsys)
	h.store.MeasureReads(h.engine.Expect)
	return h, nil
}

// Routed is closed once it is known for all GPUs and roots which way is faster. Until then pieces of directories are staged.
func (h *Host) Routed() <-chan struct{} { return h.devices.Routed() }

func (h *Host) newEngine() (*transfer.Engine, error) {
	e := h.cfg.Engine
	return transfer.New(transfer.Config{
		Threads: e.ThreadsPerGPU, SlotBytes: int(e.SlotBytes), MaxStaging: e.MaxStagingMemory, ReadRatio: e.ReadPreferringRatio,
		WriteQueue: e.MaxWriteQueue, Roots: len(h.cfg.Roots), Log: h.log,
	})
}

// serverConfig is a configuration in the form of the server.
func (h *Host) serverConfig(c *config.Config) (out server.Config, err error) {
	s := c.Session
	rules, users, err := accessOf(c)
	if err != nil {
		return out, err
	}
	memory, arriving, err := memoryBudgets(c)
	if err != nil {
		return out, err
	}
	return server.Config{
		Store: h.store, Engine: h.engine, GPUs: h.devices.GPUs(), Log: h.log, Version: h.version, LeaseTTL: s.LeaseTTL, MaxWait: s.MaxWait,
		Peers: h.peers, Memory: memory, Arriving: arriving, Capacity: c.Capacity(), Levels: len(h.store.Stats().Levels),
		Info: h.Status, Admin: admin{host: h}, Pins: s.Pins, Rules: rules, Users: users, Spans: h.traced,
		Limits: server.Limits{
			KeysPerLookup: s.MaxKeys, ChunksPerJob: s.MaxChunks, MessageBytes: int(s.MaxMessage), Sessions: s.MaxSessions,
			ArenaBytes: s.MaxRegistered,
		},
	}, nil
}

var writes = map[string]store.Write{config.WriteHits: store.WriteHits, config.WriteThrough: store.WriteThrough}

// traits are those of what holds a root's pieces.
var traits = map[config.RootKind]store.Traits{config.Memory: store.Memory, config.Bucket: store.Bucket}

// storeConfig is a configuration in the form of the store.
func (h *Host) storeConfig(c *config.Config, b *policyset.Bound) store.Config {
	s, fsys := c.Store, h.devices.FileSystem()
	out := store.Config{Policies: b.Policies, Log: h.log, Seed: uint64(s.Seed)}
	out.FS, out.Making = fsys, sync.OnceValue(h.addressesFree)
	out.HostID = s.HostID
	out.Strict = s.Durability == config.DurabilityStrict
	if out.IOTimeout = s.IOTimeout; s.IOTimeout == 0 {
		out.IOTimeout = -1
	}
	m := c.Move
	out.Moves = store.Moves{Workers: m.Workers, Bandwidth: m.Bandwidth, Waiting: m.Waiting, Shutdown: m.Shutdown}
	for _, t := range c.Tenants {
		if t.Quota == (config.Amount{}) {
			continue
		}
		out.Quotas = append(out.Quotas, store.Quota{First: t.First, Last: t.Last, Bytes: t.Quota.Bytes, Share: t.Quota.Part})
	}
	for _, e := range c.Expiries {
		out.Expiries = append(out.Expiries, store.Expiry{Model: e.Model, TTL: e.TTL})
	}
	out.Compression = c.Modes()
	for i, r := range c.Roots {
		files, capacity := h.devices.RootFS(i, r, fsys)
		kind := r.Kind()
		minFree := r.MinFree.Bytes
		if kind.TakesMemory() {
			minFree = r.Capacity - capacity // of memory that stays smaller as well
		}
		out.Roots = append(out.Roots, store.RootConfig{
			Path: r.Path, Medium: store.Medium{FS: files, Traits: traits[kind]}, Capacity: capacity, Level: r.Level, Write: writes[r.Write],
			Compressed: c.Compresses(), Speeds: h.speeds,
			Shared: r.Shared, RequireMount: r.RequireMount,
			Poll: s.SharedPoll, Lapse: s.SharedLapse,
			ForPieces: r.ForPieces || !kind.HasDirectory(), MinFree: minFree, MinFreePart: r.MinFree.Part,
			DailyWrites: r.DailyWrites, Evict: b.Roots[i],
		})
	}
	if h.peers != nil {
		farthest := slices.MaxFunc(c.Roots, func(a, b config.Root) int { return a.Level - b.Level })
		out.Roots = append(out.Roots, h.peers.Root(farthest.Level+1))
	}
	return out
}

// Run serves until the context is done, a listener fails, a policy with on_fault = stop fails, or there was no session for
// session.idle_exit. Then it closes the host. A GPU that went out of service is an error too ([gds.ErrLost]).
func (h *Host) Run(ctx context.Context) error {
	ctx, idle := context.WithCancel(ctx)
	defer idle()
	g, ctx := errgroup.WithContext(ctx)
	if limit := h.cfg.Session.IdleExit; limit > 0 {
		g.Go(func() error { h.untilIdle(ctx, limit); idle(); return nil })
	}
	g.Go(func() error { return h.server.Serve(ctx, h.cfg.Socket) })
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case err := <-h.policies.Failed():
			return fmt.Errorf("%w: %w", policyset.ErrPolicy, err)
		}
	})
	if h.http != nil {
		g.Go(func() error { return h.http.Serve(ctx) })
	}
	err := g.Wait()
	return errors.Join(err, h.Close(), h.devices.Lost())
}

// untilIdle returns once there was no session for so long, or the context is done.
func (h *Host) untilIdle(ctx context.Context, limit time.Duration) {
	const looks = 8 // in the limit
	tick := time.NewTicker(max(limit/looks, time.Millisecond))
	defer tick.Stop()
	for last := time.Now(); time.Since(last) < limit; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if h.server.Stats().Sessions > 0 {
				last = time.Now()
			}
		}
	}
	h.log.Info("no session, ending", "for", limit, "setting", "session.idle_exit")
}

// Ready is closed once clients can connect.
func (h *Host) Ready() <-chan struct{} { return h.server.Ready() }

// Socket is the path that clients connect to.
func (h *Host) Socket() string { return h.cfg.Socket }

// Policies are the host's policies, which can be changed while it runs.
func (h *Host) Policies() *policyset.Set { return h.policies }

// HTTPAddr is the address of the HTTP interface; empty when it is off.
func (h *Host) HTTPAddr() string {
	if h.http == nil {
		return ""
	}
	return h.http.Addr()
}

// Close closes the parts in the reverse order of their start: sessions before the peers, from which they borrow, and the engine that moves their bytes, the
// engine before the GPUs and the store that it uses, the store before the file systems of its roots and its policies.
func (h *Host) Close() error {
	h.closeOnce.Do(func() {
		var errs []error
		if h.http != nil {
			errs = append(errs, h.http.Close())
		}
		if h.server != nil {
			errs = append(errs, h.server.Close())
		}
		errs = append(errs, h.peers.Close())
		if h.spans != nil {
			h.spans.Close()
		}
		if h.engine != nil {
			h.devices.EndRoutes()
			errs = append(errs, h.engine.Close())
		}
		if h.devices != nil {
			errs = append(errs, h.devices.Close())
		}
		if h.store != nil {
			errs = append(errs, h.store.Close())
		}
		if h.devices != nil {
			errs = append(errs, h.devices.CloseRoots())
		}
		errs = append(errs, h.peers.CloseFiles())
		if h.policies != nil {
			errs = append(errs, h.policies.Close(context.Background()))
		}
		h.closeErr = errors.Join(errs...)
	})
	return h.closeErr
}
