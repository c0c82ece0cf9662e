package policyset

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store"
)

// Swapped is the result of a swap.
type Swapped struct {
	Module, Digest string
	Taken          []store.Taken
}

// Swap replaces the module of the policy with this label, in all its roles, while sessions continue. If the module is
// refused, or fails before it has taken over, the old one stays. Fields that are empty in c are taken from the policy's
// configuration, and settings in c override the policy's.
func (p *Set) Swap(ctx context.Context, label string, c config.Policy) (Swapped, error) {
	merged := func() (config.Policy, error) { return p.merged(label, c), nil }
	return p.change(ctx, label, merged, p.swap)
}

// change opens the module of a policy's next configuration and applies it. The module is opened without the turn, so if another
// change was made meanwhile, all is done again.
func (p *Set) change(
	ctx context.Context, label string, next func() (config.Policy, error),
	apply func(context.Context, *policy.Handle, *config.Policy) (Swapped, error),
) (Swapped, error) {
	for {
		var cfg *config.Config
		var want config.Policy
		if err := p.locked(ctx, func() (err error) { cfg = p.cfg; want, err = next(); return err }); err != nil {
			return Swapped{}, err
		}
		h, err := p.open(ctx, cfg, label, &want)
		if err != nil {
			p.log.Warn("policy not swapped: module refused", "policy", label, "error", err)
			return Swapped{}, err
		}
		var out Swapped
		again := false
		err = p.locked(ctx, func() error {
			now, err := next()
			if again = err == nil && !reflect.DeepEqual(now, want); again || err != nil {
				return err
			}
			out, err = apply(ctx, h, &want)
			return err
		})
		h.Release()
		if !again {
			return out, err
		}
	}
}

// merged returns the configuration of the policy with this label, overridden by c.
func (p *Set) merged(label string, c config.Policy) config.Policy {
	next := config.Policy{Module: label} // the label of a built-in policy
	if old := p.cfg.Labelled(label); old != nil {
		next = *old
	}
	if next.SHA256 != "" && c.Module != "" {
		next.SHA256 = "" // the digest is that of the old module
	}
	next.Module, next.SHA256 = cmp.Or(c.Module, next.Module), cmp.Or(c.SHA256, next.SHA256)
	next.Config = maps.Clone(next.Config)
	for k, v := range c.Config {
		if next.Config == nil {
			next.Config = map[string]string{}
		}
		next.Config[k] = v
	}
	return next
}

func (p *Set) swap(ctx context.Context, h *policy.Handle, c *config.Policy) (out Swapped, err error) {
	label := h.Label
	out = Swapped{Module: h.Module.Name(), Digest: h.Module.Digest()}
	if old := p.cfg.Labelled(label); old != nil && old.Shadow {
		if err = checkShadow(ErrRole, h, c); err == nil {
			err = p.store.SwapShadow(ctx, store.Shadow{Policy: h, Capacity: c.Capacity})
		}
	} else {
		out.Taken, err = p.swapActive(ctx, h, c)
	}
	if err != nil {
		p.log.Warn("policy not swapped", "policy", label, "error", err)
		return out, err
	}
	p.setActive(h, c)
	p.log.Info("policy swapped", "policy", label, "module", h.Module.Name(), "version", h.Module.Manifest().Version,
		"sha256", h.Module.Digest())
	return out, nil
}

// setActive records the module and the configuration that become active under a label.
func (p *Set) setActive(h *policy.Handle, c *config.Policy) {
	next := *p.cfg
	next.Policies = slices.Clone(next.Policies)
	for i := range next.Policies {
		if next.Label(i) == h.Label {
			c.Name = h.Label
			next.Policies[i] = *c
		}
	}
	if p.cfg.Labelled(h.Label) == nil { // the shadow is new
		next.Policies = append(next.Policies, *c)
		next.Policies[len(next.Policies)-1].Name = h.Label
	}
	p.cfg = &next
	h.Acquire()
	p.clearActive(h.Label)
	p.active[h.Label] = h
}

// clearActive releases the module that was active under a label.
func (p *Set) clearActive(label string) {
	if h := p.active[label]; h != nil {
		delete(p.active, label)
		h.Release()
	}
}

// swapActive gives a module every role of the policies with its label.
func (p *Set) swapActive(ctx context.Context, h *policy.Handle, c *config.Policy) ([]store.Taken, error) {
	roles, err := p.rolesOf(h, c)
	if err != nil {
		return nil, err
	}
	w := store.Swap{From: h.Label}
	for role, has := range roles {
		if has {
			w.Policies[role] = h
		}
	}
	return p.store.Swap(ctx, w)
}

// rolesOf returns the roles of the policies with a handle's label. The handle's module must have them all.
func (p *Set) rolesOf(h *policy.Handle, c *config.Policy) (roles [abi.Roles]bool, err error) {
	for _, st := range p.store.Stats().Policies {
		if st.Name != h.Label {
			continue
		}
		if !h.Module.Has(st.Role) {
			return roles, fmt.Errorf("%w: %s has the roles %v, policy %s acts as %s too",
				ErrRole, c.Module, h.Module.Manifest().Roles, h.Label, st.Role)
		}
		roles[st.Role] = true
	}
	if roles == [abi.Roles]bool{} {
		return roles, fmt.Errorf("%w: no policy %q is active; `kvhost policy list` lists the active ones", ErrPolicy, h.Label)
	}
	return roles, nil
}

// Promote makes a new instance of a shadow's module the evict policy of one root or of all roots, and ends the shadow.
func (p *Set) Promote(ctx context.Context, label, root string) (Swapped, error) {
	acting := func() (config.Policy, error) {
		c := p.cfg.Labelled(label)
		if c == nil || !c.Shadow {
			return config.Policy{}, fmt.Errorf("%w: %q is not a shadow", ErrPolicy, label)
		}
		next := *c
		next.Shadow, next.Capacity = false, 0
		return next, nil
	}
	return p.change(ctx, label, acting, func(ctx context.Context, h *policy.Handle, next *config.Policy) (Swapped, error) {
		return p.promote(ctx, h, next, root)
	})
}

func (p *Set) promote(ctx context.Context, h *policy.Handle, next *config.Policy, root string) (out Swapped, err error) {
	label := h.Label
	if judged := p.active[label].Module.Digest(); h.Module.Digest() != judged {
		return Swapped{}, fmt.Errorf("%w: %s: its SHA-256 is %s now, that of the shadow is %s: swap the shadow first",
			ErrPolicy, next.Module, h.Module.Digest(), judged)
	}
	out = Swapped{Module: h.Module.Name(), Digest: h.Module.Digest()}
	out.Taken, err = p.store.Swap(ctx, store.Swap{Root: root, Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: h}})
	if err != nil {
		return out, err
	}
	if err := p.store.RemoveShadow(label); err != nil {
		return out, err
	}
	p.setActive(h, next)
	p.log.Info("shadow promoted", "policy", label, "module", h.Module.Name(), "sha256", h.Module.Digest())
	return out, nil
}
