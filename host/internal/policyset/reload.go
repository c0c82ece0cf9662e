package policyset

import (
	"context"
	"errors"
	"reflect"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// Reload changes the policies to those of a configuration. All modules are opened and tested first. A policy with the same
// module and settings as before continues. apply gets the new assignment and either changes the store to it or changes nothing.
// Reload returns the labels of policies with a changed module file.
func (p *Set) Reload(ctx context.Context, cfg *config.Config, apply func(*Bound) error) (changed []string, err error) {
	handles, err := p.openAll(ctx, cfg)
	defer func() {
		for _, h := range handles {
			h.Release()
		}
	}()
	if err != nil {
		return nil, err
	}
	err = p.locked(ctx, func() error {
		for i, h := range handles {
			now := p.active[h.Label]
			switch {
			case now == nil:
			case p.acts(now, h, &cfg.Policies[i]):
				handles[i] = now.Acquire()
				h.Release()
			case now.Module.Digest() != h.Module.Digest():
				changed = append(changed, h.Label)
			}
		}
		b := &Bound{Roots: make([]*policy.Handle, len(cfg.Roots)), cfg: cfg}
		for i, h := range handles {
			if err := b.bind(h, i); err != nil {
				return err
			}
		}
		before := p.memory.Limit()
		p.memory.SetLimit(max(before, uint64(cfg.PolicyMemory))) // enough for both limits while instances of both exist
		if err := apply(b); err != nil {
			p.memory.SetLimit(before)
			return err
		}
		p.memory.SetLimit(uint64(cfg.PolicyMemory))
		for label := range p.active {
			p.clearActive(label)
		}
		for _, h := range handles {
			p.active[h.Label] = h.Acquire()
		}
		p.cfg = cfg
		return nil
	})
	return changed, err
}

// acts reports whether a module that was opened for a policy of the next configuration is already active under its label, with
// the same settings. The digest is compared, because the file of a module may have changed under the same name.
func (p *Set) acts(now, opened *policy.Handle, next *config.Policy) bool {
	instance := func(c config.Policy) config.Policy { // without the fields that only say where the policy acts
		c.Name, c.Roles, c.Namespaces, c.Shadow, c.Capacity = "", nil, nil, false, 0
		return c
	}
	old := p.cfg.Labelled(opened.Label)
	return old != nil && now.Module.Digest() == opened.Module.Digest() && reflect.DeepEqual(instance(*old), instance(*next))
}

// openAll opens the modules of a configuration. The caller releases the handles, also after an error.
func (p *Set) openAll(ctx context.Context, cfg *config.Config) (handles []*policy.Handle, err error) {
	var errs []error
	for i := range cfg.Policies {
		h, err := p.open(ctx, cfg, cfg.Label(i), &cfg.Policies[i])
		if err != nil {
			p.log.Warn("policy module refused", "policy", cfg.Label(i), "error", err)
			errs = append(errs, err)
			continue
		}
		handles = append(handles, h)
	}
	return handles, errors.Join(errs...)
}
