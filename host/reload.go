package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/host/config"
	"github.com/kvhost/kvhost/host/store"
)

// step is one part of a reload: a policy or a shadow whose module is open and has the roles it needs, and how to take it back.
type step struct {
	label string
	c     config.Policy
	l     *lent
	done  func()
	old   *config.Policy // nil for a shadow that is new
}

// Reload makes policies what a configuration says: it swaps those whose module, digest, limits or settings differ from what
// acts, begins and ends shadows. All modules are opened and tried before anything changes, and when one of them cannot take
// over after all, those before it are taken back: then everything is as it was. What a policy is bound to (roles, roots,
// namespaces), and which policies there are besides shadows, needs a restart: a configuration that has it otherwise is refused
// with [ErrRestart]. Other keys are not looked at.
func (h *Host) Reload(ctx context.Context, cfg *config.Config) error {
	p := h.policies
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.rebound(cfg); err != nil {
		return err
	}
	steps, kept, err := h.plan(ctx, cfg)
	defer func() {
		for _, s := range steps {
			s.done()
		}
	}()
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	before, acted := p.cfg, maps.Clone(p.acted)
	var undo []func() error
	for _, s := range steps {
		if was := acted[s.label]; was != nil { // it may have to come back
			defer was.l.use()()
		}
		if err := h.take(ctx, s); err != nil {
			errs := []error{fmt.Errorf("policy %s: %w", s.label, err)}
			for _, back := range slices.Backward(undo) {
				errs = append(errs, back())
			}
			return fmt.Errorf("all was taken back: %w", errors.Join(errs...))
		}
		was, old := acted[s.label], s.old
		undo = append(undo, func() error {
			err := h.takeBack(context.WithoutCancel(ctx), s, was, old)
			p.cfg = before
			return err
		})
	}
	h.log.Info("configuration read again", "changed", len(steps), "unchanged", kept, "shadows_ended", h.endShadows(cfg))
	return nil
}

// endShadows ends those that a configuration does not have.
func (h *Host) endShadows(cfg *config.Config) (ended int) {
	p := h.policies
	next := *p.cfg
	next.Policies = nil
	for i := range p.cfg.Policies {
		label := p.cfg.Label(i)
		if cfg.Labelled(label) != nil {
			next.Policies = append(next.Policies, p.cfg.Policies[i])
			next.Policies[len(next.Policies)-1].Name = label
			continue
		}
		_ = h.store.RemoveShadow(label) // it fails only when there is none
		p.forget(label)
		ended++
	}
	p.cfg = &next
	return ended
}

// rebound names what a running host cannot change.
func (p *policySet) rebound(cfg *config.Config) error {
	var what []string
	say := func(format string, args ...any) { what = append(what, fmt.Sprintf(format, args...)) }
	for i := range p.cfg.Policies {
		if label := p.cfg.Label(i); cfg.Labelled(label) == nil && !p.cfg.Policies[i].Shadow {
			say("policy %s is not there any more", label)
		}
	}
	for i := range cfg.Policies {
		label, c := cfg.Label(i), &cfg.Policies[i]
		old := p.cfg.Labelled(label)
		switch {
		case old == nil && !c.Shadow:
			say("policy %s is new", label)
		case old == nil:
		case old.Shadow != c.Shadow:
			say("policy %s changes between shadow and acting (kvhost policy promote does it)", label)
		case !slices.Equal(old.Roles, c.Roles):
			say("policy %s has other roles", label)
		case !slices.Equal(old.Namespaces, c.Namespaces):
			say("policy %s has other namespaces", label)
		}
	}
	for _, r := range cfg.Roots {
		i := slices.IndexFunc(p.cfg.Roots, func(o config.Root) bool { return o.Path == r.Path })
		if i >= 0 && p.cfg.Roots[i].Evict != r.Evict {
			say("root %s has another evict policy", r.Path)
		}
	}
	if len(what) == 0 {
		return nil
	}
	return fmt.Errorf("%w: nothing was changed: %s", ErrRestart, strings.Join(what, "; "))
}

// plan opens what is to come. The steps' modules are the caller's to give back, also when there is an error.
func (h *Host) plan(ctx context.Context, cfg *config.Config) (steps []step, kept int, err error) {
	p := h.policies
	var errs []error
	for i := range cfg.Policies {
		s := step{label: cfg.Label(i), c: cfg.Policies[i], old: p.cfg.Labelled(cfg.Label(i))}
		s.c.Name = s.label
		var err error
		if s.l, s.done, err = p.lend(ctx, &s.c); err != nil {
			h.log.Warn("a policy's module is refused", "policy", s.label, "error", err)
			errs = append(errs, err)
			continue
		}
		if !h.differs(&s) {
			s.done()
			kept++
			continue
		}
		steps = append(steps, s)
		if s.c.Shadow {
			err = mayShadow(s.l, &s.c)
		} else {
			_, err = h.rolesOf(s.label, s.l, &s.c)
		}
		errs = append(errs, err)
	}
	return steps, kept, errors.Join(errs...)
}

// differs says whether what the configuration names is another policy than what acts: its file may have changed under the
// same name.
func (h *Host) differs(s *step) bool {
	if s.old == nil {
		return true
	}
	a, b := *s.old, s.c
	a.Name, b.Name = "", ""
	acts := h.policies.acted[s.label]
	return !reflect.DeepEqual(a, b) || acts == nil || acts.l.Digest() != s.l.Digest()
}

// take makes one step.
func (h *Host) take(ctx context.Context, s step) (err error) {
	switch {
	case s.old == nil:
		err = h.store.AddShadow(ctx, store.Shadow{Use: s.l.as(s.label, &s.c), Capacity: s.c.Capacity})
	case s.c.Shadow:
		err = h.reshadow(ctx, s.label, s.l, &s.c)
	default:
		_, err = h.takeOver(ctx, s.label, s.l, &s.c)
	}
	if err == nil {
		h.policies.remember(s.label, s.l, &s.c)
	}
	return err
}

// takeBack undoes a step. A shadow's trial begins anew.
func (h *Host) takeBack(ctx context.Context, s step, was *acted, old *config.Policy) error {
	if old == nil {
		h.policies.forget(s.label)
		return h.store.RemoveShadow(s.label)
	}
	back := step{label: s.label, c: *old, l: was.l, old: &s.c}
	back.c.Name = s.label
	return h.take(ctx, back)
}
