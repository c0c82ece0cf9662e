package policyset

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store"
)

// step is one change of a reload: a policy or a shadow whose module is open and has the roles that it needs.
type step struct {
	c   config.Policy
	h   *policy.Handle
	old *config.Policy // nil for a new shadow
}

// Reload applies the policies of a configuration: it swaps those whose module, digest, limits or settings differ from
// the active ones, and starts and ends shadows. All modules are opened and tested before anything changes. If one of
// them cannot take over after all, those before it are reverted. Which policies there are besides shadows, and what
// they are bound to (roles, roots, namespaces), needs a restart: a configuration that changes it is refused with
// [ErrRestart]. Other keys are ignored.
func (p *Set) Reload(ctx context.Context, cfg *config.Config) error {
	if err := p.locked(ctx, func() error { return p.checkBindings(cfg) }); err != nil {
		return err
	}
	handles, err := p.openAll(ctx, cfg)
	defer func() {
		for _, h := range handles {
			h.Release()
		}
	}()
	if err == nil {
		err = p.lock(ctx)
	}
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	defer p.unlock()
	if err := p.checkBindings(cfg); err != nil {
		return err
	}
	steps, unchanged, err := p.plan(cfg, handles)
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	before, active := p.cfg, maps.Clone(p.active)
	for _, h := range active { // to revert to
		defer h.Acquire().Release()
	}
	for i, s := range steps {
		if err := p.apply(ctx, s); err != nil {
			errs := []error{fmt.Errorf("policy %s: %w", s.h.Label, err)}
			for _, done := range slices.Backward(steps[:i]) {
				errs = append(errs, p.revert(context.WithoutCancel(ctx), done, active[done.h.Label]))
			}
			p.cfg = before
			return fmt.Errorf("all changes were reverted: %w", errors.Join(errs...))
		}
	}
	p.log.Info("configuration reloaded", "changed", len(steps), "unchanged", unchanged, "shadows_ended", p.endShadows(cfg))
	return nil
}

// endShadows ends the shadows that a configuration does not have.
func (p *Set) endShadows(cfg *config.Config) (ended int) {
	next := *p.cfg
	next.Policies = nil
	for i := range p.cfg.Policies {
		label := p.cfg.Label(i)
		if cfg.Labelled(label) != nil {
			next.Policies = append(next.Policies, p.cfg.Policies[i])
			next.Policies[len(next.Policies)-1].Name = label
			continue
		}
		_ = p.store.RemoveShadow(label) // it fails only if there is no such shadow
		p.clearActive(label)
		ended++
	}
	p.cfg = &next
	return ended
}

// checkBindings refuses a configuration that changes what a running host cannot change.
func (p *Set) checkBindings(cfg *config.Config) error {
	var problems []string
	add := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	for i := range p.cfg.Policies {
		if label := p.cfg.Label(i); cfg.Labelled(label) == nil && !p.cfg.Policies[i].Shadow {
			add("policy %s was removed", label)
		}
	}
	for i := range cfg.Policies {
		label, c := cfg.Label(i), &cfg.Policies[i]
		old := p.cfg.Labelled(label)
		switch {
		case old == nil && !c.Shadow:
			add("policy %s is new", label)
		case old == nil:
		case old.Shadow != c.Shadow:
			add("policy %s changes between shadow and acting (kvhost policy promote does it)", label)
		case !slices.Equal(old.Roles, c.Roles):
			add("policy %s has other roles", label)
		case !slices.Equal(old.Namespaces, c.Namespaces):
			add("policy %s has other namespaces", label)
		}
	}
	for _, r := range cfg.Roots {
		i := slices.IndexFunc(p.cfg.Roots, func(o config.Root) bool { return o.Path == r.Path })
		if i >= 0 && p.cfg.Roots[i].Evict != r.Evict {
			add("root %s has another evict policy", r.Path)
		}
	}
	if len(problems) == 0 {
		return nil
	}
	return fmt.Errorf("%w: nothing was changed: %s", ErrRestart, strings.Join(problems, "; "))
}

// openAll opens the modules of a configuration. The caller releases the handles, also after an error.
func (p *Set) openAll(ctx context.Context, cfg *config.Config) (handles []*policy.Handle, err error) {
	var errs []error
	for i := range cfg.Policies {
		h, err := p.open(ctx, cfg.Label(i), &cfg.Policies[i])
		if err != nil {
			p.log.Warn("policy module refused", "policy", cfg.Label(i), "error", err)
			errs = append(errs, err)
			continue
		}
		handles = append(handles, h)
	}
	return handles, errors.Join(errs...)
}

// plan compares a configuration, whose modules are open, with the active one.
func (p *Set) plan(cfg *config.Config, handles []*policy.Handle) (steps []step, unchanged int, err error) {
	var errs []error
	for i, h := range handles {
		s := step{c: cfg.Policies[i], h: h, old: p.cfg.Labelled(h.Label)}
		s.c.Name = h.Label
		if !p.differs(&s) {
			unchanged++
			continue
		}
		steps = append(steps, s)
		if s.c.Shadow {
			err = checkShadow(ErrRole, s.h, &s.c)
		} else {
			_, err = p.rolesOf(s.h, &s.c)
		}
		errs = append(errs, err)
	}
	return steps, unchanged, errors.Join(errs...)
}

// differs reports whether a step changes anything. The file of a module may have changed under the same name.
func (p *Set) differs(s *step) bool {
	if s.old == nil {
		return true
	}
	a, b := *s.old, s.c
	a.Name, b.Name = "", ""
	h := p.active[s.h.Label]
	return !reflect.DeepEqual(a, b) || h == nil || h.Module.Digest() != s.h.Module.Digest()
}

// apply makes one change.
func (p *Set) apply(ctx context.Context, s step) (err error) {
	switch {
	case s.old == nil:
		err = p.store.AddShadow(ctx, store.Shadow{Policy: s.h, Capacity: s.c.Capacity})
	case s.c.Shadow:
		err = p.swapShadow(ctx, s.h, &s.c)
	default:
		_, err = p.swapActive(ctx, s.h, &s.c)
	}
	if err == nil {
		p.setActive(s.h, &s.c)
	}
	return err
}

// revert undoes a step: the module that was active before takes over again. A shadow starts anew.
func (p *Set) revert(ctx context.Context, s step, was *policy.Handle) error {
	if s.old == nil {
		p.clearActive(s.h.Label)
		return p.store.RemoveShadow(s.h.Label)
	}
	back := step{c: *s.old, h: was, old: &s.c}
	back.c.Name = s.h.Label
	return p.apply(ctx, back)
}
