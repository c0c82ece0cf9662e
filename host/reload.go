package host

import (
	"context"
	"errors"
	"reflect"

	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/store"
)

// Reload makes policies what a configuration says: it swaps those whose module, digest, limits or settings differ from what
// acts, begins and ends shadows. A policy that is refused stays as it is; the others are swapped all the same. Which roles,
// roots and namespaces a policy has, and every other key, needs a restart.
func (h *Host) Reload(ctx context.Context, cfg *config.Config) error {
	p := h.policies
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	swapped, kept := 0, 0
	for i := range p.cfg.Policies {
		label := p.cfg.Label(i)
		if old := &p.cfg.Policies[i]; cfg.Labelled(label) == nil {
			if !old.Shadow {
				h.log.Warn("a policy that is not in the configuration any more acts until the host is restarted", "policy", label)
				continue
			}
			if err := h.store.RemoveShadow(label); err != nil && !errors.Is(err, store.ErrNoPolicy) {
				errs = append(errs, err)
			}
		}
	}
	for i := range cfg.Policies {
		label, c := cfg.Label(i), cfg.Policies[i]
		old := p.cfg.Labelled(label)
		switch {
		case old == nil && !c.Shadow:
			h.log.Warn("a policy that is new in the configuration acts when the host is restarted", "policy", label)
		case old == nil:
			errs = append(errs, h.newShadow(ctx, label, &c))
		case old.Shadow != c.Shadow || !reflect.DeepEqual(old.Roles, c.Roles) || !reflect.DeepEqual(old.Namespaces, c.Namespaces):
			h.log.Warn("what a policy is bound to changes when the host is restarted", "policy", label)
		default:
			changed, err := h.differs(ctx, label, old, &c)
			if err == nil && changed {
				_, err = h.swap(ctx, label, &c)
				swapped++
			} else if err == nil {
				kept++
			}
			errs = append(errs, err)
		}
	}
	h.log.Info("configuration read again", "swapped", swapped, "unchanged", kept)
	return errors.Join(errs...)
}

// differs says whether what the configuration names is another policy than what acts: its file may have changed under the
// same name.
func (h *Host) differs(ctx context.Context, label string, old, c *config.Policy) (bool, error) {
	a, b := *old, *c
	a.Name, b.Name = "", ""
	if !reflect.DeepEqual(a, b) {
		return true, nil
	}
	l, done, err := h.policies.lend(ctx, c)
	if err != nil {
		h.log.Warn("a policy is not swapped: its module is refused", "policy", label, "error", err)
		return false, err
	}
	defer done()
	return l.Digest() != h.policies.held[label], nil
}

func (h *Host) newShadow(ctx context.Context, label string, c *config.Policy) error {
	p := h.policies
	l, done, err := p.lend(ctx, c)
	if err != nil {
		return err
	}
	defer done()
	if err := h.store.AddShadow(ctx, store.Shadow{Use: l.as(label, c), Capacity: c.Capacity}); err != nil {
		return err
	}
	next := *p.cfg
	next.Policies = append(next.Policies[:len(next.Policies):len(next.Policies)], *c)
	next.Policies[len(next.Policies)-1].Name = label
	p.cfg, p.held[label] = &next, l.Digest()
	return nil
}
