package host

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/store"
)

// Swapped is what came of a swap.
type Swapped struct {
	Module, Digest string
	Taken          []store.Taken
}

// SwapPolicy puts a module in the place of the policy of this label, in all its roles, while sessions go on. A module that is
// refused, or fails before it has taken over, leaves the policy where it is. What c leaves open stays as it was: module,
// grants and the like; its settings stand over the policy's.
func (h *Host) SwapPolicy(ctx context.Context, label string, c config.Policy) (Swapped, error) {
	p := h.policies
	p.mu.Lock()
	defer p.mu.Unlock()
	next := config.Policy{Module: label} // a built-in policy
	if old := p.cfg.Labelled(label); old != nil {
		next = *old
	}
	if next.SHA256 != "" && c.Module != "" {
		next.SHA256 = "" // it pins the module before
	}
	next.Module, next.SHA256 = cmp.Or(c.Module, next.Module), cmp.Or(c.SHA256, next.SHA256)
	next.Config = maps.Clone(next.Config)
	for k, v := range c.Config {
		if next.Config == nil {
			next.Config = map[string]string{}
		}
		next.Config[k] = v
	}
	return h.swap(ctx, label, &next)
}

// swap opens what is to come and lets it take over. The caller holds policies.mu.
func (h *Host) swap(ctx context.Context, label string, c *config.Policy) (Swapped, error) {
	p := h.policies
	l, done, err := p.lend(ctx, c)
	if err != nil {
		h.log.Warn("a policy is not swapped: its module is refused", "policy", label, "error", err)
		return Swapped{}, err
	}
	defer done()
	out := Swapped{Module: l.Name(), Digest: l.Digest()}
	if old := p.cfg.Labelled(label); old != nil && old.Shadow {
		err = h.reshadow(ctx, label, l, c)
	} else {
		out.Taken, err = h.takeOver(ctx, label, l, c)
	}
	if err != nil {
		h.log.Warn("a policy is not swapped", "policy", label, "error", err)
		return out, err
	}
	p.remember(label, l, c)
	h.log.Info("policy swapped", "policy", label, "module", l.Name(), "version", l.Manifest().Version, "sha256", l.Digest())
	return out, nil
}

// remember notes what acts under a label now.
func (p *policySet) remember(label string, l *lent, c *config.Policy) {
	next := *p.cfg
	next.Policies = slices.Clone(next.Policies)
	for i := range next.Policies {
		if next.Label(i) == label {
			c.Name = label
			next.Policies[i] = *c
		}
	}
	if p.cfg.Labelled(label) == nil { // a shadow that is new
		next.Policies = append(next.Policies, *c)
		next.Policies[len(next.Policies)-1].Name = label
	}
	p.cfg = &next
	p.forget(label)
	p.acted[label] = &acted{l, l.use()}
}

// forget lets go of what acted under a label.
func (p *policySet) forget(label string) {
	if a := p.acted[label]; a != nil {
		a.done()
		delete(p.acted, label)
	}
}

// takeOver gives a module every role that the policies of a label have now.
func (h *Host) takeOver(ctx context.Context, label string, l *lent, c *config.Policy) ([]store.Taken, error) {
	roles, err := h.rolesOf(label, l, c)
	if err != nil {
		return nil, err
	}
	w := store.Swap{From: label}
	for role, has := range roles {
		if has {
			u := l.as(label, c)
			w.Uses[role] = &u
		}
	}
	return h.store.Swap(ctx, w)
}

// rolesOf are those that the policies of a label have now; the module must have them all.
func (h *Host) rolesOf(label string, l *lent, c *config.Policy) (roles [abi.Roles]bool, err error) {
	for _, st := range h.store.Stats().Policies {
		if st.Name != label || st.Replaced {
			continue
		}
		if !l.Has(st.Role) {
			return roles, fmt.Errorf("%w: %s has the roles %v, policy %s acts as %s too", ErrRole, c.Module, l.Manifest().Roles, label, st.Role)
		}
		roles[st.Role] = true
	}
	if roles == [abi.Roles]bool{} {
		return roles, fmt.Errorf("%w: %q; `kvhost policy list` names those that act", ErrPolicy, label)
	}
	return roles, nil
}

func mayShadow(l *lent, c *config.Policy) error {
	if !l.Has(abi.RoleEvict) {
		return fmt.Errorf("%w: %s cannot be a shadow: it does not evict, it has %v", ErrRole, c.Module, l.Manifest().Roles)
	}
	return nil
}

// reshadow begins a trial anew with another module.
func (h *Host) reshadow(ctx context.Context, label string, l *lent, c *config.Policy) error {
	if err := mayShadow(l, c); err != nil {
		return err
	}
	return h.store.SwapShadow(ctx, store.Shadow{Use: l.as(label, c), Capacity: c.Capacity})
}

// PromotePolicy lets a fresh instance of a shadow's module evict, in one root or in all, and ends the shadow.
func (h *Host) PromotePolicy(ctx context.Context, label, root string) (Swapped, error) {
	p := h.policies
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.cfg.Labelled(label)
	if c == nil || !c.Shadow {
		return Swapped{}, fmt.Errorf("%w: %q is not a shadow", ErrPolicy, label)
	}
	next := *c
	next.Shadow, next.Capacity = false, 0
	l, done, err := p.lend(ctx, &next)
	if err != nil {
		return Swapped{}, err
	}
	defer done()
	if judged := p.acted[label].l.Digest(); l.Digest() != judged {
		return Swapped{}, fmt.Errorf("%w: %s: its SHA-256 is %s now, the shadow that was judged has %s: swap the shadow first", ErrPolicy, next.Module, l.Digest(), judged)
	}
	u := l.as(label, &next)
	out := Swapped{Module: l.Name(), Digest: l.Digest()}
	if out.Taken, err = h.store.Swap(ctx, store.Swap{Root: root, Uses: [abi.Roles]*store.Use{abi.RoleEvict: &u}}); err != nil {
		return out, err
	}
	if err := h.store.RemoveShadow(label); err != nil {
		return out, err
	}
	p.remember(label, l, &next)
	h.log.Info("shadow promoted", "policy", label, "module", l.Name(), "sha256", l.Digest())
	return out, nil
}
