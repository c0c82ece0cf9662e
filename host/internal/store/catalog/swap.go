package catalog

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// Swap is a prepared change of the policies that are bound to namespaces.
type Swap struct {
	c         *Catalog
	admit     rebinding[*policy.Admit]
	layout    rebinding[*policy.Layout]
	place     rebinding[*policy.Place]
	made      []*Class
	seen      map[*Namespace]bool
	admitKept map[*policy.Admit]bool // policies that took over the state of their predecessor
}

// Swapped describes a policy that was replaced.
type Swapped struct {
	Role   abi.Role
	From   string // digest of the module
	Loaded bool   // for admit: the new policy took over the state
}

// PrepareSwap prepares the replacement of the policies with a name. All bindings stay. The contract is that of PrepareRebind.
func (c *Catalog) PrepareSwap(
	ctx context.Context, name string, next *[abi.Roles]*policy.Handle, maxState uint32,
) (*Swap, error) {
	var all [abi.Roles][]wish
	found := [abi.Roles]bool{abi.RoleEvict: true}
	as := func(role abi.Role, bound string, rule *Rule, h *policy.Handle) {
		if bound == name && next[role] != nil {
			h, found[role] = next[role], true
		}
		all[role] = append(all[role], wish{bound, rule, h})
	}
	for _, b := range *c.admit.Load() {
		as(abi.RoleAdmit, b.Name, b.rule, b.Now().Handle)
	}
	for _, b := range *c.layout.Load() {
		as(abi.RoleLayout, b.Name, b.rule, b.Now().Handle)
	}
	for _, b := range *c.place.Load() {
		as(abi.RolePlace, b.Name, b.rule, b.Now().Handle)
	}
	for role, h := range next {
		if h != nil && !found[role] {
			return &Swap{c: c}, fmt.Errorf("%w: %s policy %s", ErrNoPolicy, abi.Role(role), name)
		}
	}
	return c.prepare(ctx, &all, maxState)
}

// PrepareRebind prepares new bindings. It opens the policies that are not running yet, tells them about their namespaces, and
// creates the classes for new pieces. The caller must call Commit or Abandon afterwards, even after an error, and hold Lock
// until then. maxState is the maximum number of bytes of state that an admit policy may hand over.
func (c *Catalog) PrepareRebind(ctx context.Context, p *Policies, maxState uint32) (*Swap, error) {
	var all [abi.Roles][]wish
	for _, role := range []abi.Role{abi.RoleAdmit, abi.RoleLayout, abi.RolePlace} {
		all[role] = p.wishes(role)
	}
	return c.prepare(ctx, &all, maxState)
}

func (c *Catalog) prepare(ctx context.Context, all *[abi.Roles][]wish, maxState uint32) (w *Swap, err error) {
	o := &c.opt
	w = &Swap{c: c, seen: map[*Namespace]bool{}, admitKept: map[*policy.Admit]bool{}}
	err = w.admit.rebind(o, *c.admit.Load(), abi.RoleAdmit, all[abi.RoleAdmit],
		func(h *policy.Handle, old *Active[*policy.Admit]) (*policy.Admit, error) {
			return w.openAdmit(ctx, h, old, maxState)
		})
	if err != nil {
		return w, err
	}
	err = w.layout.rebind(o, *c.layout.Load(), abi.RoleLayout, all[abi.RoleLayout],
		func(h *policy.Handle, _ *Active[*policy.Layout]) (*policy.Layout, error) {
			return h.Module.NewLayout(ctx, policy.LayoutOptions{Seed: o.Seed, Config: h.Config, MaxNamespaces: MaxNamespaces})
		})
	if err != nil {
		return w, err
	}
	err = w.place.rebind(o, *c.place.Load(), abi.RolePlace, all[abi.RolePlace],
		func(h *policy.Handle, _ *Active[*policy.Place]) (*policy.Place, error) {
			p, err := h.Module.NewPlace(ctx, policy.PlaceOptions{Seed: o.Seed, Config: h.Config, MaxNamespaces: MaxNamespaces, Observe: h.Observe})
			if facts := c.facts.Load(); err == nil && facts != nil {
				p.SetRoots(*facts)
			}
			return p, err
		})
	if err != nil {
		return w, err
	}
	for _, ns := range c.Namespaces() {
		if err := w.prepare(ctx, ns); err != nil {
			return w, fmt.Errorf("namespace %s: %w", ns.Digest, err)
		}
		w.seen[ns] = true
	}
	return w, nil
}

// openAdmit opens an admit policy with the state of its predecessor, if the new policy can use it.
func (w *Swap) openAdmit(
	ctx context.Context, h *policy.Handle, old *Active[*policy.Admit], maxState uint32,
) (*policy.Admit, error) {
	o, state := &w.c.opt, policy.State{}
	if old != nil {
		var err error
		var ok bool
		if state, ok, err = old.Policy.Save(maxState); err != nil || !ok {
			state = policy.State{} // saving failed or the policy keeps no state: the new one starts empty
		}
	}
	p, err := h.Module.NewAdmit(ctx, policy.AdmitOptions{
		Capacity: o.Capacity, Seed: o.Seed, Config: h.Config, MaxNamespaces: MaxNamespaces, State: state, Observe: h.Observe,
	})
	if err == nil {
		w.admitKept[p] = old != nil && p.Loaded()
	}
	return p, err
}

// prepare announces a namespace to those of its future policies that are not bound to it yet. If its layout changes, it creates
// the new classes.
func (w *Swap) prepare(ctx context.Context, ns *Namespace) error {
	if a := w.admit.acting(w.admit.next.of(ns.Text)); a != ns.Admit.Now() {
		if err := a.Policy.Namespace(ns.ID, ns.Text); err != nil {
			return err
		}
	}
	var plans []*kv.Plan
	if l := w.layout.acting(w.layout.next.of(ns.Text)); l != ns.Layout.Now() && ns.groups != nil {
		var err error
		if plans, err = ns.makePlans(ctx, w.c.opt.Roots, ns.groups, l.Policy); err != nil {
			return err
		}
	}
	if p := w.place.acting(w.place.next.of(ns.Text)); p != ns.Place.Now() {
		if err := p.Policy.Namespace(ns.ID, ns.Text); err != nil {
			return err
		}
	}
	for group, was := range *ns.current.Load() {
		plan := was.Plan
		for i := range plans {
			if ns.groups[i].ID == group && plans[i].Digest() != plan.Digest() {
				plan = plans[i]
			}
		}
		if plan == was.Plan {
			continue
		}
		w.c.mu.Lock()
		cl, err := w.c.newClass(ns, group)
		w.c.mu.Unlock()
		if err != nil {
			return err
		}
		w.made = append(w.made, cl)
		cl.setPlan(plan)
	}
	return nil
}

func (w *Swap) Abandon() {
	for _, cl := range w.made {
		cl.Release()
	}
	w.place.abandon()
	w.layout.abandon()
	w.admit.abandon()
}

// Commit replaces the policies. Existing pieces keep their names and plans.
func (w *Swap) Commit() (list []Swapped) {
	c := w.c
	admits, layouts, places := w.admit.commit(), w.layout.commit(), w.place.commit()
	c.admit.Store(&w.admit.next)
	c.layout.Store(&w.layout.next)
	c.place.Store(&w.place.next)
	c.mu.Lock()
	for _, ns := range c.byDigest {
		ns.bind(c)
		if !w.seen[ns] { // a scan or another host has found its first piece since the preparation
			if err := c.announce(ns); err != nil {
				c.log.Error("policies were not told of a namespace", "namespace", ns.Digest, "error", err)
			}
		}
	}
	for _, cl := range w.made {
		c.setCurrent(cl)
	}
	c.mu.Unlock()
	for _, p := range admits {
		list = append(list, Swapped{Role: abi.RoleAdmit, From: p.end(), Loaded: p.by != nil && w.admitKept[p.by.Policy]})
	}
	for _, p := range places {
		list = append(list, Swapped{Role: abi.RolePlace, From: p.end()})
	}
	for _, p := range layouts {
		list = append(list, Swapped{Role: abi.RoleLayout, From: p.end()})
	}
	return list
}

// wish is a rule and the policy for the namespaces that match it. The handle is borrowed.
type wish struct {
	name   string
	rule   *Rule // nil for all remaining namespaces
	handle *policy.Handle
}

// wishes returns the wishes of a role. The last one is for all remaining namespaces.
func (p *Policies) wishes(role abi.Role) (list []wish) {
	add := func(h *policy.Handle, rule *Rule) {
		w := wish{policy.Builtin(role).Name(), rule, h}
		if h != nil {
			w.name = h.Label
		}
		list = append(list, w)
	}
	for i := range p.Rules {
		if r := &p.Rules[i]; r.Role == role {
			add(r.Policy, r)
		}
	}
	add([abi.Roles]*policy.Handle{abi.RoleAdmit: p.Admit, abi.RolePlace: p.Place, abi.RoleLayout: p.Layout}[role], nil)
	return list
}

// rebinding is a prepared change of the bindings of one role.
type rebinding[P running] struct {
	next   Bindings[P]
	opened []successor[P]
	ended  []*Binding[P] // bindings that are not in next
}

// successor is a policy that was opened for a binding.
type successor[P running] struct {
	binding *Binding[P]
	policy  *Active[P]
	follows bool // the binding has another policy until the commit
}

// acting returns the policy of a binding after the commit.
func (r *rebinding[P]) acting(b *Binding[P]) *Active[P] {
	for _, s := range r.opened {
		if s.binding == b {
			return s.policy
		}
	}
	return b.Now()
}

// rebind opens the policies that are missing for the wishes of a role. Policies that are running already are kept, and rules
// with the same policy share it. open gets the policy that is replaced, or nil.
func (r *rebinding[P]) rebind(
	o *Options, now Bindings[P], role abi.Role, list []wish, open func(h *policy.Handle, old *Active[P]) (P, error),
) (err error) {
	for _, w := range list {
		b := r.next.named(w.name)
		if b == nil {
			if b, err = r.bind(o, now.named(w.name), role, w, open); err != nil {
				return err
			}
		}
		r.next = append(r.next, boundRule[P]{b, w.rule})
	}
	for b := range now.Each() {
		if !r.next.has(b) {
			r.ended = append(r.ended, b)
		}
	}
	return nil
}

// bind returns the binding for a wish. b is the existing binding with its name, or nil.
func (r *rebinding[P]) bind(
	o *Options, b *Binding[P], role abi.Role, w wish, open func(h *policy.Handle, old *Active[P]) (P, error),
) (*Binding[P], error) {
	h := w.handle
	if h == nil {
		h = policy.BuiltinHandle(role)
		defer h.Release()
	}
	var old *Active[P]
	if b != nil {
		if old = b.Now(); old.Handle == h || w.handle == nil && old.Module.Digest() == h.Module.Digest() {
			return b, nil
		}
	}
	p, err := open(h, old)
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", h.Label, err)
	}
	a := &Active[P]{Handle: h.Acquire(), Policy: p, Since: o.Now()}
	follows := b != nil
	if !follows {
		b = &Binding[P]{Name: h.Label}
		b.now.Store(a)
	}
	r.opened = append(r.opened, successor[P]{b, a, follows})
	return b, nil
}

func (r *rebinding[P]) abandon() {
	for _, s := range r.opened {
		_ = s.policy.close()
	}
}

// replaced is a policy that is no longer in use, and its successor or nil.
type replaced[P running] struct{ old, by *Active[P] }

// end closes the replaced policy and returns the digest of its module.
func (p replaced[P]) end() (digest string) {
	digest = p.old.Module.Digest()
	_ = p.old.close()
	return digest
}

// commit puts the opened policies into use and returns those that are no longer in use.
func (r *rebinding[P]) commit() (list []replaced[P]) {
	for _, s := range r.opened {
		if s.follows {
			list = append(list, replaced[P]{s.binding.now.Swap(s.policy), s.policy})
		}
	}
	for _, b := range r.ended {
		list = append(list, replaced[P]{old: b.Now()})
	}
	return list
}
