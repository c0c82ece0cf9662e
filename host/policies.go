package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/sandbox"
	"github.com/kvhost/kvhost/host/store"
)

// policySet is the policies that the configuration names: opened, counted, and bound to roots and namespaces. A role that
// none takes has the built-in policy.
type policySet struct {
	log    *slog.Logger
	cache  *sandbox.Cache
	failed chan error     // a policy's fault that ends the host
	store  store.Policies // for the store to start with
	roots  []*store.Use   // likewise, by root: the evict policy that it names, or nil

	mu    sync.Mutex // one change at a time
	cfg   *config.Config
	acted map[string]*acted // by label

	openMu sync.Mutex
	open   map[*lent]struct{}
}

// lent is an open module, closed when nobody uses it any more.
type lent struct {
	*policy.Module
	set   *policySet
	users atomic.Int32
}

// acted is the module that acts under a label, open for as long as it may be had back.
type acted struct {
	l    *lent
	done func()
}

// lend opens a module. The caller is its first user, until it calls the function.
func (p *policySet) lend(ctx context.Context, c *config.Policy) (*lent, func(), error) {
	opt := PolicyOptions(p.cfg, c, p.cache, p.log)
	opt.Stop = p.stop
	m, err := policy.Open(ctx, c.Module, opt)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %s: %w", ErrPolicy, c.Module, err)
	}
	l := &lent{Module: m, set: p}
	p.openMu.Lock()
	p.open[l] = struct{}{}
	p.openMu.Unlock()
	return l, l.use(), nil
}

// use counts a user; the function ends that, once.
func (l *lent) use() func() {
	l.users.Add(1)
	return sync.OnceFunc(func() {
		if l.users.Add(-1) == 0 {
			l.set.openMu.Lock()
			delete(l.set.open, l)
			l.set.openMu.Unlock()
			if err := l.Close(context.Background()); err != nil {
				l.set.log.Warn("a policy's module could not be closed", "module", l.Name(), "error", err)
			}
		}
	})
}

func (l *lent) as(label string, c *config.Policy) store.Use {
	return store.Use{Name: label, Module: l.Module, Config: policy.Config(c.Config), Done: l.use()}
}

// openPolicies loads the configured modules in order.
func openPolicies(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *policySet, err error) {
	cache, err := OpenPolicyCache(cfg.PolicyCache, log)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPolicy, err)
	}
	p := &policySet{
		cfg: cfg, log: log, cache: cache, failed: make(chan error, 1), open: map[*lent]struct{}{}, acted: map[string]*acted{},
		roots: make([]*store.Use, len(cfg.Roots)),
	}
	p.store.Reopen = policy.Options{Log: log, Cache: cache}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close(ctx))
		}
	}()
	for i := range cfg.Policies {
		l, done, err := p.lend(ctx, &cfg.Policies[i])
		if err != nil {
			return p, err
		}
		err = p.assign(l, i)
		done()
		if err != nil {
			return p, err
		}
		p.acted[cfg.Label(i)] = &acted{l, l.use()}
		log.Info("policy loaded", "policy", cfg.Label(i), "module", l.Name(), "version", l.Manifest().Version, "sha256", l.Digest(), "roles", l.Manifest().Roles)
	}
	return p, nil
}

// PolicyOptions are what the configuration says about opening a policy.
func PolicyOptions(cfg *config.Config, c *config.Policy, cache *sandbox.Cache, log *slog.Logger) policy.Options {
	opt := policy.Options{
		Log: log, Dir: cfg.PolicyDir, Grants: c.Grants, SHA256: c.SHA256, PublicKey: c.PublicKey, Cache: cache,
		MemoryPages: uint32(c.MemoryPages), Fuel: sandbox.Fuel{Call: uint64(c.Fuel.Call), Record: uint64(c.Fuel.Record), Time: c.Fuel.Time},
	}
	if c.OnFault == config.OnFaultStop {
		opt.OnFault = policy.Stop
	}
	return opt
}

// OpenPolicyCache opens the cache of compiled policies that the configuration names. One that cannot be used is an error
// when it was named, and done without otherwise.
func OpenPolicyCache(dir string, log *slog.Logger) (*sandbox.Cache, error) {
	if dir != config.CacheAuto {
		return sandbox.OpenCache(dir)
	}
	cache, err := sandbox.OpenCache(sandbox.CacheDir())
	if err != nil {
		log.Warn("policies are compiled at each start", "error", err)
		return sandbox.OpenCache("")
	}
	return cache, nil
}

// stop ends the host for a policy's fault; the first is enough.
func (p *policySet) stop(err error) {
	select {
	case p.failed <- err:
	default:
	}
}

// assign gives the i-th policy's module the roles that its configuration names, or all that it has: evict in the roots that
// name it or in those that name none, the others for its namespaces or for all that are left.
func (p *policySet) assign(l *lent, i int) error {
	c, label := &p.cfg.Policies[i], p.cfg.Label(i)
	if c.Shadow {
		if !l.Has(abi.RoleEvict) {
			return fmt.Errorf("%w: %s cannot be a shadow: it does not evict, it has %v", ErrPolicy, c.Module, l.Manifest().Roles)
		}
		p.store.Shadows = append(p.store.Shadows, store.Shadow{Use: l.as(label, c), Capacity: c.Capacity})
		return nil
	}
	patterns, err := patternsOf(c)
	if err != nil {
		return err
	}
	rest := [abi.Roles]*store.Use{
		abi.RoleEvict: &p.store.Evict, abi.RoleAdmit: &p.store.Admit, abi.RolePlace: &p.store.Place, abi.RoleLayout: &p.store.Layout,
	}
	for role := range abi.Roles {
		named := slices.Contains(c.Roles, role.String())
		if named && !l.Has(role) {
			return fmt.Errorf("%w: %s does not have the role %q, it has %v", ErrPolicy, c.Module, role, l.Manifest().Roles)
		}
		if !l.Has(role) || (len(c.Roles) > 0 && !named) {
			continue
		}
		switch {
		case role == abi.RoleEvict && p.cfg.EvictsByName(i):
			for k, r := range p.cfg.Roots {
				if r.Evict == label {
					u := l.as(label, c)
					p.roots[k] = &u
				}
			}
			continue
		case len(patterns) > 0 && role != abi.RoleEvict:
			p.store.Rules = append(p.store.Rules, store.Rule{Role: role, Namespaces: patterns, Use: l.as(label, c)})
			continue
		case len(patterns) > 0 && !named:
			continue // it is here for its namespaces
		}
		if rest[role].Module != nil {
			return fmt.Errorf("%w: %s and %s both have the role %q for all that is not bound: give each its roles (roles = [...]), its namespaces (namespaces = [...]), or its roots (evict = %q of a root)",
				ErrRole, rest[role].Module.Name(), l.Name(), role, label)
		}
		*rest[role] = l.as(label, c)
	}
	if p.cfg.EvictsByName(i) && !l.Has(abi.RoleEvict) {
		return fmt.Errorf("%w: a root names %s to evict, it has the roles %v", ErrPolicy, label, l.Manifest().Roles)
	}
	return nil
}

func patternsOf(c *config.Policy) (list []chunk.Pattern, err error) {
	for _, text := range c.Namespaces {
		n, err := chunk.ParsePattern(text)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrPolicy, c.Module, err)
		}
		list = append(list, n)
	}
	return list, nil
}

// close ends what is still open, whoever used it.
func (p *policySet) close(ctx context.Context) error {
	var errs []error
	p.openMu.Lock()
	defer p.openMu.Unlock()
	for l := range p.open {
		errs = append(errs, l.Close(ctx))
	}
	clear(p.open)
	return errors.Join(append(errs, p.cache.Close(ctx))...)
}
