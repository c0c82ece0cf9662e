package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/tetratelabs/wazero"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store"
)

// policySet is the configured modules and the roles they got. A role that none takes has the built-in policy.
type policySet struct {
	modules []*policy.Module
	cache   wazero.CompilationCache
	store   store.Policies
}

// openPolicies loads the configured modules in order.
func openPolicies(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *policySet, err error) {
	p := &policySet{cache: wazero.NewCompilationCache()}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close(ctx))
		}
	}()
	for i := range cfg.Policies {
		c := &cfg.Policies[i]
		m, err := policy.Open(ctx, c.Module, policy.Options{Log: log, Dir: cfg.PolicyDir, Grants: c.Grants, Cache: p.cache})
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

// assign gives a module the roles that its configuration names, or all that it has.
func (p *policySet) assign(m *policy.Module, c *config.Policy) error {
	slots := [abi.Roles]struct {
		module **policy.Module
		config *policy.Config
	}{
		abi.RoleEvict:  {&p.store.Evict, &p.store.EvictConfig},
		abi.RoleAdmit:  {&p.store.Admit, &p.store.AdmitConfig},
		abi.RolePlace:  {&p.store.Place, &p.store.PlaceConfig},
		abi.RoleLayout: {&p.store.Layout, &p.store.LayoutConfig},
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
		if *s.module != nil {
			return fmt.Errorf("%w: %s and %s both have the role %q: give each its roles in the configuration (roles = [...])",
				ErrRole, (*s.module).Name(), m.Name(), role)
		}
		*s.module, *s.config = m, policy.Config(c.Config)
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
