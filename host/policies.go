package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store"
)

// policySet is the configured modules and the roles they got. A role that none takes has the built-in policy.
type policySet struct {
	modules []*policy.Module
	cache   *policy.Cache
	store   store.Policies
	failed  chan error // a policy's fault that ends the host
}

// openPolicies loads the configured modules in order.
func openPolicies(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *policySet, err error) {
	cache, err := OpenPolicyCache(cfg.PolicyCache, log)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPolicy, err)
	}
	p := &policySet{cache: cache, failed: make(chan error, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close(ctx))
		}
	}()
	for i := range cfg.Policies {
		c := &cfg.Policies[i]
		opt := PolicyOptions(cfg, c, p.cache, log)
		opt.Stop = p.stop
		m, err := policy.Open(ctx, c.Module, opt)
		if err != nil {
			return p, fmt.Errorf("%w: %s: %w", ErrPolicy, c.Module, err)
		}
		p.modules = append(p.modules, m)
		if err := p.assign(m, c); err != nil {
			return p, err
		}
		log.Info("policy loaded", "module", m.Name(), "version", m.Manifest().Version, "sha256", m.Digest(), "roles", m.Manifest().Roles)
	}
	return p, nil
}

// PolicyOptions are what the configuration says about opening a policy.
func PolicyOptions(cfg *config.Config, c *config.Policy, cache *policy.Cache, log *slog.Logger) policy.Options {
	opt := policy.Options{
		Log: log, Dir: cfg.PolicyDir, Grants: c.Grants, SHA256: c.SHA256, PublicKey: c.PublicKey, Cache: cache,
		MemoryPages: uint32(c.MemoryPages), Fuel: policy.Fuel{Call: uint64(c.Fuel.Call), Record: uint64(c.Fuel.Record)},
	}
	if c.OnFault == config.OnFaultStop {
		opt.OnFault = policy.Stop
	}
	return opt
}

// OpenPolicyCache opens the cache of compiled policies that the configuration names. One that cannot be used is an error
// when it was named, and done without otherwise.
func OpenPolicyCache(dir string, log *slog.Logger) (*policy.Cache, error) {
	if dir != config.CacheAuto {
		return policy.OpenCache(dir)
	}
	cache, err := policy.OpenCache(policy.CacheDir())
	if err != nil {
		log.Warn("policies are compiled at each start", "error", err)
		return policy.OpenCache("")
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

// assign gives a module the roles that its configuration names, or all that it has.
func (p *policySet) assign(m *policy.Module, c *config.Policy) error {
	slots := [abi.Roles]*store.Use{
		abi.RoleEvict: &p.store.Evict, abi.RoleAdmit: &p.store.Admit, abi.RolePlace: &p.store.Place, abi.RoleLayout: &p.store.Layout,
	}
	for role := range abi.Roles {
		named := slices.Contains(c.Roles, role.String())
		if named && !m.Has(role) {
			return fmt.Errorf("%w: %s does not have the role %q, it has %v", ErrPolicy, c.Module, role, m.Manifest().Roles)
		}
		if !m.Has(role) || (len(c.Roles) > 0 && !named) {
			continue
		}
		s := slots[role]
		if s.Module != nil {
			return fmt.Errorf("%w: %s and %s both have the role %q: give each its roles in the configuration (roles = [...])",
				ErrRole, s.Module.Name(), m.Name(), role)
		}
		*s = store.Use{Module: m, Config: policy.Config(c.Config)}
	}
	return nil
}

func (p *policySet) close(ctx context.Context) error {
	var errs []error
	for _, m := range p.modules {
		errs = append(errs, m.Close(ctx))
	}
	return errors.Join(append(errs, p.cache.Close(ctx))...)
}
