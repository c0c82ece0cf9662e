package policyset

import (
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/kv"
)

// Bound assigns policies to roles. The set holds the references.
type Bound struct {
	Policies store.Policies
	Roots    []*policy.Handle // by root: the evict policy that the root names, or nil
	cfg      *config.Config
}

// bind gives the i-th policy's module the roles that its configuration names, or all of its roles. An evict policy gets
// the roots that name it, or those that name none. For the other roles, it gets the namespaces of its configuration, or
// all that remain.
func (b *Bound) bind(h *policy.Handle, i int) error {
	c := &b.cfg.Policies[i]
	if c.Shadow {
		if err := checkShadow(ErrPolicy, h, c); err != nil {
			return err
		}
		b.Policies.Shadows = append(b.Policies.Shadows, store.Shadow{Policy: h, Capacity: c.Capacity})
		return nil
	}
	patterns, err := kv.ParsePatterns(c.Namespaces)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrPolicy, c.Module, err)
	}
	for role := range abi.Roles {
		named := slices.Contains(c.Roles, role.String())
		if named && !h.Module.Has(role) {
			return fmt.Errorf("%w: %s does not have the role %q, it has %v", ErrPolicy, c.Module, role,
				h.Module.Manifest().Roles)
		}
		if !h.Module.Has(role) || (len(c.Roles) > 0 && !named) {
			continue
		}
		switch {
		case role == abi.RoleEvict && b.cfg.EvictsByName(i):
			b.bindRoots(h)
		case len(patterns) > 0 && role != abi.RoleEvict:
			b.Policies.Rules = append(b.Policies.Rules, catalog.Rule{Role: role, Namespaces: patterns, Policy: h})
		case len(patterns) > 0 && !named: // the policy is only for its namespaces
		default:
			if err := b.bindRest(role, h); err != nil {
				return err
			}
		}
	}
	if b.cfg.EvictsByName(i) && !h.Module.Has(abi.RoleEvict) {
		return fmt.Errorf("%w: a root names %s to evict, it has the roles %v", ErrPolicy, h.Label, h.Module.Manifest().Roles)
	}
	return nil
}

// bindRoots makes a policy evict in the roots that name it.
func (b *Bound) bindRoots(h *policy.Handle) {
	for k, r := range b.cfg.Roots {
		if r.Evict == h.Label {
			b.Roots[k] = h
		}
	}
}

// bindRest gives a policy a role for everything that no rule matches.
func (b *Bound) bindRest(role abi.Role, h *policy.Handle) error {
	rest := [abi.Roles]**policy.Handle{
		abi.RoleEvict: &b.Policies.Evict, abi.RoleAdmit: &b.Policies.Admit, abi.RolePlace: &b.Policies.Place, abi.RoleLayout: &b.Policies.Layout,
	}
	if other := *rest[role]; other != nil {
		return fmt.Errorf("%w: %s and %s both have the role %q for all that is not bound: give each its roles (roles = "+
			"[...]), "+
			"its namespaces (namespaces = [...]), or its roots (evict = %q of a root)",
			ErrRole, other.Module.Name(), h.Module.Name(), role, h.Label)
	}
	*rest[role] = h
	return nil
}

// checkShadow returns an error of the given kind if the module cannot be a shadow.
func checkShadow(kind error, h *policy.Handle, c *config.Policy) error {
	if h.Module.Has(abi.RoleEvict) {
		return nil
	}
	return fmt.Errorf("%w: %s cannot be a shadow: it does not evict, it has %v", kind, c.Module, h.Module.Manifest().Roles)
}
