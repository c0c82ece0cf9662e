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
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/regular"
	"github.com/kvhost/kvhost/host/internal/server"
	"github.com/kvhost/kvhost/host/internal/spans"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/staging"
)

// Config configures a host for [New].
type Config struct {
	Config  *config.Config // validated
	Log     *slog.Logger
	Version string // version that clients see
	// Memory is the size of a root in memory in front of the configured ones: see [config.Config.WithMemory]. 0 means none.
	Memory int64
	// Load reads the configuration again, for [Host.Reread]. It may be nil. Level, if it is not nil, is then set to the
	// configured level.
	Load  func() (*config.Config, error)
	Level *slog.LevelVar
	// Speeds replaces the measured speeds with compression = "auto", in tests.
	Speeds func() codec.Speeds
}

// Host is a running kvhost.
type Host struct {
	made     Config                        // argument of New
	cfg      *config.Config                // configuration at the start
	live     atomic.Pointer[config.Config] // configuration after the last reload
	machine  int64                         // memory of the machine in bytes at the start
	log      *slog.Logger
	policies *policyset.Set
	devices  *devices.Devices
	peers    *peers.Peers // nil if there are no peers
	store    *store.Store
	engine   *transfer.Engine
	server   *server.Server
	http     *observe.Server // nil without an HTTP interface
	figures  observe.Host
	spans    *spans.Tracer
	traced   *server.RequestSpans
	found    *Checked // findings of a check; nil otherwise

	certificates []*regular.Renewed[certificate] // certificates that the configuration names

	reloads   observe.Reloads
	reloading sync.Mutex // held during Reload
	closeOnce sync.Once
	closeErr  error
}

// New opens the parts of a host. It does not serve yet. ctx limits the time of opening.
func New(ctx context.Context, cfg Config) (*Host, error) {
	h := unopened(cfg)
	for _, p := range h.parts() {
		if err := p.open(ctx); err != nil {
			return nil, errors.Join(err, h.Close())
		}
	}
	return h, nil
}

// unopened returns a host without its parts.
func unopened(cfg Config) *Host {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Load == nil {
		cfg.Load = func() (*config.Config, error) {
			return nil, fmt.Errorf("%w: there is no configuration to read", ErrRestart)
		}
	}
	machine, _, _ := staging.MachineMemory()
	h := &Host{made: cfg, cfg: OnMachine(cfg.Config, machine).WithMemory(cfg.Memory), machine: machine}
	h.live.Store(h.cfg)
	h.log = slog.New(limitLog(cfg.Log.Handler(), sandbox.LogMessage, logReloaded, logRefused))
	return h
}

// part is one part of a host. Parts are opened in the order of the list.
type part struct {
	about string // subject of the part's error
	open  func(context.Context) error
	works bool // the part uses GPUs or serves, so [Check] leaves it out
}

func (h *Host) parts() []part {
	return []part{
		{about: "policies", open: h.openPolicies},
		{about: "memory", open: func(context.Context) (err error) { h.devices, err = devices.Open(h.cfg, h.log); return err }},
		{about: "peers", open: h.openPeers},
		{about: "roots", open: h.openStore},
		{about: "memory", open: h.openEngine},
		{about: "GPUs", open: h.openGPUs, works: true},
		{about: "certificates", open: h.judgeCertificates},
		{about: "traces", open: h.openSpans},
		{about: "access", open: func(context.Context) error { _, _, err := accessOf(h.cfg); return err }},
		{about: "memory", open: func(context.Context) error { _, _, err := memoryBudgets(h.cfg); return err }},
		{about: "sessions", open: h.openServer, works: true},
		{about: "HTTP", open: h.openHTTP},
		{about: "routes", open: func(context.Context) error {
			h.devices.OpenRoutes(h.engine, h.store, h.devices.FileSystem())
			h.store.MeasureReads(h.engine.Expect)
			return nil
		}, works: true},
	}
}

func (h *Host) openPolicies(ctx context.Context) error {
	p, err := policyset.Open(ctx, h.cfg, h.log)
	if err == nil {
		h.policies = p
	}
	return err
}

// openStore opens the store. In a check, built-in policies replace those that could not be opened, and the store is not opened without the
// memory of its roots.
func (h *Host) openStore(ctx context.Context) (err error) {
	if h.devices == nil {
		return nil
	}
	bound := &policyset.Bound{Roots: make([]*policy.Handle, len(h.cfg.Roots))}
	if h.policies != nil {
		bound = h.policies.Bound()
	}
	if h.store, err = store.Open(ctx, h.storeConfig(h.cfg, bound)); err == nil && h.policies != nil {
		h.policies.Attach(h.store)
	}
	return err
}

// readRatio is the share of loads among started tasks while stores wait, too. writeQueue is the time after which a store that
// no worker has begun is shed.
const (
	readRatio  = 0.75
	writeQueue = 10 * time.Second
)

func (h *Host) openEngine(context.Context) (err error) {
	e := h.cfg.Engine
	h.engine, err = transfer.New(transfer.Config{
		Threads: e.ThreadsPerGPU, SlotBytes: int(e.SlotBytes), MaxStaging: e.MaxStagingMemory, ReadRatio: readRatio,
		WriteQueue: writeQueue, Roots: len(h.cfg.Roots), Log: h.log,
	})
	return err
}

func (h *Host) openGPUs(context.Context) error {
	pinners := h.peers.Pinners()
	if err := h.devices.OpenGPUs(h.engine, h.store.AwaitLoads, pinners...); err != nil {
		return err
	}
	for _, p := range pinners { // after the GPUs, because the slots move to the GPUs' NUMA nodes first
		if err := h.engine.Register(p); err != nil {
			return err
		}
	}
	return nil
}

func (h *Host) openServer(context.Context) error {
	sessions, err := h.serverConfig(h.cfg)
	if err != nil {
		return err
	}
	h.server = server.New(sessions)
	if h.peers != nil {
		h.peers.Start(h.store)
	}
	h.figures = observe.Host{Store: h.store, Engine: h.engine, Server: h.server,
		GPUs: h.devices.GPUs(), Memory: h.devices.Memory(), Buckets: h.devices.Buckets(), PolicyMemory: h.policies.Memory(),
		Peers: h.peers, Version: h.made.Version, Spans: h.spans, Reloads: &h.reloads, Certificates: h.certificateEnds}
	return nil
}

func (h *Host) openHTTP(context.Context) (err error) {
	if h.cfg.HTTP.Listen == "" {
		return nil
	}
	w := httpConfig(h.cfg, h.log)
	if h.server != nil {
		w.Registry, w.Status, w.Connections = h.figures.Registry(), h.server.Status, h.server.HTTPConnections()
	}
	h.http, err = observe.Listen(w)
	return err
}

// Routed returns a channel that is closed when the routes of all GPUs and roots are chosen. Until then, pieces of directories
// are staged.
func (h *Host) Routed() <-chan struct{} { return h.devices.Routed() }

// serverConfig returns the configuration of the server.
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
		Store: h.store, Engine: h.engine, GPUs: h.devices.GPUs(), Log: h.log, Version: h.made.Version, LeaseTTL: s.LeaseTTL, MaxWait: s.MaxWait,
		Peers: h.peers, Memory: memory, Arriving: arriving, Capacity: c.Capacity(), Levels: len(h.store.Stats().Levels),
		Info: h.Status, Admin: admin{host: h}, Pins: s.Pins, Rules: rules, Users: users, Spans: h.traced,
		Limits: server.Limits{Sessions: s.MaxSessions, ArenaBytes: s.MaxRegistered},
	}, nil
}

var writes = map[string]store.Write{config.WriteHits: store.WriteHits, config.WriteThrough: store.WriteThrough}

// traits are the traits of a root's medium, by its kind.
var traits = map[config.RootKind]store.Traits{config.Memory: store.Memory, config.Bucket: store.Bucket}

// storeConfig returns the configuration of the store.
func (h *Host) storeConfig(c *config.Config, b *policyset.Bound) store.Config {
	s, fsys := c.Store, h.devices.FileSystem()
	out := store.Config{Policies: b.Policies, Log: h.log, Seed: 1}
	out.FS, out.Dry, out.Making = fsys, h.found != nil, sync.OnceValue(h.addressesFree)
	out.HostID = s.HostID
	out.Strict = s.Durability == config.DurabilityStrict
	if out.IOTimeout = s.IOTimeout; s.IOTimeout == 0 {
		out.IOTimeout = -1
	}
	m := c.Move
	out.Moves = store.Moves{Workers: m.Workers, Bandwidth: m.Bandwidth, Shutdown: m.Shutdown}
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
			Compressed: c.Compresses(), Speeds: h.made.Speeds,
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
// session.idle_exit. Then it closes the host. It also returns an error if a GPU went out of service ([gds.ErrLost]).
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

// untilIdle returns when there was no session for the time limit, or the context is done.
func (h *Host) untilIdle(ctx context.Context, limit time.Duration) {
	const looks = 8 // looks within the limit
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

// Ready returns a channel that is closed when clients can connect.
func (h *Host) Ready() <-chan struct{} { return h.server.Ready() }

// Socket returns the path to which clients connect.
func (h *Host) Socket() string { return h.cfg.Socket }

// Policies returns the host's policies, which can be changed while it runs.
func (h *Host) Policies() *policyset.Set { return h.policies }

// HTTPAddr returns the address of the HTTP interface. It is empty if there is none.
func (h *Host) HTTPAddr() string {
	if h.http == nil {
		return ""
	}
	return h.http.Addr()
}

// Close closes the parts in the reverse order of their start. Sessions come before the peers from which they borrow, and before the engine
// that moves their bytes. The engine comes before the GPUs and the store. The store comes before the file systems of its roots, and before
// its policies.
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
			if h.devices != nil {
				h.devices.EndRoutes()
			}
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
