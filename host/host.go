package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/server"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/transfer"
	"github.com/kvhost/kvhost/staging"
)

// Config is what a host is made from.
type Config struct {
	Config  *config.Config // validated
	Log     *slog.Logger
	Version string // told to clients
}

// Host is a whole kvhost.
type Host struct {
	cfg      *config.Config
	log      *slog.Logger
	policies *policySet
	store    *store.Store
	engine   *transfer.Engine
	driver   *gds.Driver // nil: no GPUs
	gpus     []*gds.GPU
	cufile   *gds.CuFile // nil: everything is staged
	fs       staging.FS
	server   *server.Server
	http     *httpListener // nil when off

	directMu sync.Mutex
	direct   []*gds.DirectRoute // of GPUs

	closeOnce sync.Once
	closeErr  error
}

// New opens the policies and the store, and binds the HTTP listener; nothing is served yet. The context bounds opening.
func New(ctx context.Context, cfg Config) (_ *Host, err error) {
	h := &Host{cfg: cfg.Config, log: cfg.Log}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.Close())
		}
	}()
	if h.policies, err = openPolicies(ctx, h.cfg, h.log); err != nil {
		return nil, err
	}
	h.openDriver()
	h.fs = h.fileSystem()
	if h.store, err = store.Open(ctx, h.storeConfig()); err != nil {
		return nil, err
	}
	e := h.cfg.Engine
	h.engine, err = transfer.New(transfer.Config{
		Threads: e.ThreadsPerGPU, SlotBytes: int(e.SlotBytes), MaxStaging: e.MaxStagingMemory, ReadRatio: e.ReadPreferringRatio,
		WriteQueue: e.MaxWriteQueue, Roots: len(h.cfg.Roots), Log: h.log,
	})
	if err != nil {
		return nil, err
	}
	if err := h.openGPUs(); err != nil {
		return nil, err
	}
	h.openRoutes(ctx)
	s := h.cfg.Session
	h.server = server.New(server.Config{
		Store: h.store, Engine: h.engine, GPUs: h.gpus, Log: h.log, Version: cfg.Version, LeaseTTL: s.LeaseTTL, Info: h.status, Admin: admin{Host: h}, Pins: s.Pins,
		Limits: server.Limits{
			KeysPerLookup: s.MaxKeys, ChunksPerJob: s.MaxChunks, MessageBytes: int(s.MaxMessage), Sessions: s.MaxSessions, ArenaBytes: s.MaxMemory,
		},
	})
	if h.cfg.HTTP.Listen != "" {
		if h.http, err = listenHTTP(h); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// IOTimeout is how long an operation on files may take, as [store.Config] has it.
func IOTimeout(s *config.Store) time.Duration {
	if s.IOTimeout == 0 {
		return -1
	}
	return s.IOTimeout
}

func (h *Host) storeConfig() store.Config {
	s := h.cfg.Store
	out := store.Config{High: s.HighWatermark, Low: s.LowWatermark, Policies: h.policies.store, Log: h.log, Seed: uint64(s.Seed)}
	out.FS = h.fs
	out.HostID = s.HostID
	if s.Evict == config.EvictBackground {
		out.EvictMode = store.Background
	}
	switch s.Durability {
	case config.DurabilityBatch:
		out.Durability = store.Batch
	case config.DurabilityStrict:
		out.Durability = store.Strict
	}
	out.IOTimeout = IOTimeout(&s)
	for _, t := range h.cfg.Tenants {
		out.Quotas = append(out.Quotas, store.Quota{First: t.First, Last: t.Last, Bytes: t.Quota.Bytes, Share: t.Quota.Part})
	}
	for _, e := range h.cfg.Expiries {
		out.Expiries = append(out.Expiries, store.Expiry{Model: e.Model, TTL: e.TTL})
	}
	for i, r := range h.cfg.Roots {
		root := store.RootConfig{Path: r.Path, Capacity: r.Capacity, Shared: r.Shared, Poll: s.SharedPoll, Lapse: s.SharedLapse, MinFree: r.MinFree.Bytes, MinFreePart: r.MinFree.Part, DailyWrites: r.DailyWrites, Evict: h.policies.roots[i]}
		if h.wantsDirect(r) {
			root.Capacity -= probeBytes(r)
		}
		out.Roots = append(out.Roots, root)
	}
	return out
}

// Run serves until the context is done, a listener fails, or a policy does that must not, then closes the host. A GPU that
// went out of service meanwhile is a failure too ([gds.ErrLost]).
func (h *Host) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return h.server.Serve(ctx, h.cfg.Socket) })
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case err := <-h.policies.failed:
			return fmt.Errorf("%w: %w", ErrPolicy, err)
		}
	})
	if h.http != nil {
		g.Go(func() error { return h.http.serve(ctx) })
	}
	err := g.Wait()
	return errors.Join(err, h.Close(), h.Lost())
}

// Ready is closed once clients can connect.
func (h *Host) Ready() <-chan struct{} { return h.server.Ready() }

// Socket is the path that clients connect to.
func (h *Host) Socket() string { return h.cfg.Socket }

// HTTPAddr is where /healthz and /metrics are, empty when they are off.
func (h *Host) HTTPAddr() string {
	if h.http == nil {
		return ""
	}
	return h.http.addr()
}

// Close ends what runs, in the reverse order of its start: sessions before the engine that moves their bytes, the engine
// before the GPUs it copies with and the store it writes to, the store before the policies it asks.
func (h *Host) Close() error {
	h.closeOnce.Do(func() {
		var errs []error
		if h.http != nil {
			errs = append(errs, h.http.close())
		}
		if h.server != nil {
			errs = append(errs, h.server.Close())
		}
		if h.engine != nil {
			errs = append(errs, h.engine.Close())
		}
		errs = append(errs, h.closeDirect())
		for _, g := range h.gpus {
			errs = append(errs, h.unlessHung(g.Close()))
		}
		if h.store != nil {
			errs = append(errs, h.store.Close())
		}
		if h.policies != nil {
			errs = append(errs, h.policies.close(context.Background()))
		}
		h.closeErr = errors.Join(errs...)
	})
	return h.closeErr
}

// unlessHung logs the error of a GPU that hung storage keeps in use. The storage failed, not the host, and the memory goes
// with the process, so the host still closes without an error.
func (h *Host) unlessHung(err error) error {
	if !errors.Is(err, gds.ErrHung) {
		return err
	}
	h.log.Warn("GPU left open: hung storage still uses its memory", "error", err)
	return nil
}
