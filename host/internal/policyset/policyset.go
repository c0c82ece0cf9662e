package policyset

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/store"
)

// Set is the policies of a host.
type Set struct {
	log    *slog.Logger
	cache  *sandbox.Cache
	memory *sandbox.MemoryBudget
	failed chan error   // receives the fault of a policy that ends the host
	start  Bound        // policies at the store's start
	store  *store.Store // set by Attach

	turn   chan struct{} // holds a token while policies are changed; modules are opened without it
	cfg    *config.Config
	active map[string]*policy.Handle // by label

	openMu sync.Mutex
	opened map[*policy.Module]struct{}
}

// Open opens the configured modules in order and binds them.
func Open(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *Set, err error) {
	if cfg.PolicyDir != "" {
		if _, err := os.ReadDir(cfg.PolicyDir); err != nil {
			return nil, fmt.Errorf("%w: policy_dir: %w", ErrPolicy, err)
		}
	}
	cache, err := OpenCache(cfg.PolicyCache, log)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPolicy, err)
	}
	p := &Set{
		cfg: cfg, log: log, cache: cache, failed: make(chan error, 1), opened: map[*policy.Module]struct{}{},
		active: map[string]*policy.Handle{}, start: Bound{Roots: make([]*policy.Handle, len(cfg.Roots)), cfg: cfg},
		turn: make(chan struct{}, 1),
	}
	p.memory = sandbox.NewMemoryBudget(uint64(cfg.PolicyMemory))
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close(ctx))
		}
	}()
	for i := range cfg.Policies {
		h, err := p.open(ctx, cfg, cfg.Label(i), &cfg.Policies[i])
		if err != nil {
			return p, err
		}
		if err := p.start.bind(h, i); err != nil {
			h.Release()
			return p, err
		}
		p.active[h.Label] = h
		log.Info("policy loaded", "policy", h.Label, "module", h.Module.Name(), "version", h.Module.Manifest().Version,
			"sha256", h.Module.Digest(), "roles", h.Module.Manifest().Roles)
	}
	return p, nil
}

// Attach sets the store to which changes apply.
func (p *Set) Attach(st *store.Store) { p.store = st }

// Memory returns the memory of all instances, with its limit.
func (p *Set) Memory() *sandbox.MemoryBudget { return p.memory }

// Bound returns the policies at the store's start.
func (p *Set) Bound() *Bound { return &p.start }

// Failed receives the fault of a policy that is configured to end the host.
func (p *Set) Failed() <-chan error { return p.failed }

// locked calls f with the turn to change policies.
func (p *Set) locked(ctx context.Context, f func() error) error {
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
		return f()
	case <-ctx.Done():
		return fmt.Errorf("%w: another change of policies is under way: %w", ErrPolicy, context.Cause(ctx))
	}
}

// open opens a module. The caller owns the reference and must not hold the turn: reading and compiling may take long, and a
// change of another policy must not wait for it. cfg gives the directories of modules.
func (p *Set) open(ctx context.Context, cfg *config.Config, label string, c *config.Policy) (*policy.Handle, error) {
	opt := Options(cfg, c, p.cache, p.log)
	opt.Stop, opt.Memory = p.stop, p.memory
	m, err := policy.Open(ctx, c.Module, opt)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPolicy, err) // the error names the module
	}
	p.openMu.Lock()
	p.opened[m] = struct{}{}
	p.openMu.Unlock()
	h := policy.NewHandle(m, label, policy.Config(c.Config), p.closed)
	for _, n := range c.Levels {
		h.Levels |= 1 << n
	}
	return h, nil
}

// closed is called after the last reference to a module was released.
func (p *Set) closed(m *policy.Module, err error) {
	p.openMu.Lock()
	delete(p.opened, m)
	p.openMu.Unlock()
	if err != nil {
		p.log.Warn("policy module not closed", "module", m.Name(), "error", err)
	}
}

// stop ends the host because of a policy's fault. The first fault is enough.
func (p *Set) stop(err error) {
	select {
	case p.failed <- err:
	default:
	}
}

// Options returns the options for opening a policy, from its configuration and that of the host.
func Options(cfg *config.Config, c *config.Policy, cache *sandbox.Cache, log *slog.Logger) policy.Options {
	opt := policy.Options{
		Log: log, Dir: cfg.PolicyDir, Grants: c.Grants, SHA256: c.SHA256, PublicKey: c.PublicKey, Cache: cache,
		MemoryPages: uint32(c.MemoryPages),
		Fuel:        sandbox.Fuel{Call: uint64(c.Fuel.Call), Record: uint64(c.Fuel.Record), Time: c.Fuel.Time},
	}
	if c.OnFault == config.OnFaultStop {
		opt.OnFault = policy.Stop
	}
	return opt
}

// OpenCache opens the cache of compiled policies that the configuration names. An error of a named cache is returned.
// If the default cache cannot be used, OpenCache returns one that stores nothing.
func OpenCache(dir string, log *slog.Logger) (*sandbox.Cache, error) {
	if dir != config.CacheAuto {
		return sandbox.OpenCache(dir)
	}
	own := sandbox.CacheDir()
	cache, err := sandbox.OpenCache(own)
	if own == "" {
		err = errNoHome
	}
	if err != nil {
		log.Warn("policy cache unusable; policies are compiled at each start. "+
			"Set policy_cache to a directory that this user alone may write to (CacheDirectory= in systemd)", "error", err)
		return sandbox.OpenCache("")
	}
	return cache, nil
}

// Close closes every module that is still open, even if there are references to it. The store must have been closed.
func (p *Set) Close(ctx context.Context) error {
	var errs []error
	p.openMu.Lock()
	defer p.openMu.Unlock()
	for m := range p.opened {
		errs = append(errs, m.Close(ctx))
	}
	clear(p.opened)
	return errors.Join(errs...)
}
