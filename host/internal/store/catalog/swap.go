package catalog

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// Swap is a change of policies that are bound to namespaces, ready to be committed.
type Swap struct {
	c         *Catalog
	admit     rebinding[Admission]
	layout    rebinding[Layout]
	place     rebinding[Placement]
	made      []*Class
	seen      map[*Namespace]bool
	admitKept map[*Admission]bool // took over the state of the policy before
}

// Swapped is one policy that was replaced.
type Swapped struct {
	Role   abi.Role
	From   string // the module's digest
	Loaded bool   // of admit: the new policy took over the state
}

// PrepareSwap is PrepareRebind for a change that keeps all bindings: the policies of a name are replaced.
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

// PrepareRebind opens the policies that are to act and do not, tells them of their namespaces, and makes the classes that
// new pieces get. Commit or Abandon must follow, also when there is an error. The caller holds Lock until then.
// maxState bounds the state that an admit policy hands over.
func (c *Catalog) PrepareRebind(ctx context.Context, p *Policies, maxState uint32) (*Swap, error) {
	var all [abi.Roles][]wish
	for _, role := range []abi.Role{abi.RoleAdmit, abi.RoleLayout, abi.RolePlace} {
		all[role] = p.wishes(role)
	}
	return c.prepare(ctx, &all, maxState)
}

func (c *Catalog) prepare(ctx context.Context, all *[abi.Roles][]wish, maxState uint32) (w *Swap, err error) {
	w = &Swap{c: c, seen: map[*Namespace]bool{}, admitKept: map[*Admission]bool{}}
	w.admit, err = rebind(*c.admit.Load(), abi.RoleAdmit, all[abi.RoleAdmit], handleOf[*policy.Admit],
		func(h *policy.Handle, old *Admission) (*Admission, error) { return w.openAdmit(ctx, h, old, maxState) })
	if err != nil {
		return w, err
	}
	open := c.opt.layoutOpener(ctx)
	w.layout, err = rebind(*c.layout.Load(), abi.RoleLayout, all[abi.RoleLayout], handleOf[*policy.Layout],
		func(h *policy.Handle, _ *Layout) (*Layout, error) { return open(h) })
	if err != nil {
		return w, err
	}
	name := c.opt.placeOpener(ctx)
	w.place, err = rebind(*c.place.Load(), abi.RolePlace, all[abi.RolePlace], handleOf[*policy.Place],
		func(h *policy.Handle, _ *Placement) (*Placement, error) {
			p, err := name(h)
			if facts := c.facts.Load(); err == nil && facts != nil {
				p.Policy.SetRoots(*facts)
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

// openAdmit hands over the state of the acting policy, if the new one can use it.
func (w *Swap) openAdmit(ctx context.Context, h *policy.Handle, old *Admission, maxState uint32) (*Admission, error) {
	state := policy.State{}
	if old != nil {
		var err error
		var ok bool
		if state, ok, err = old.Policy.Save(maxState); err != nil || !ok {
			state = policy.State{} // it failed, or keeps none: the new one starts empty
		}
	}
	p, err := w.c.opt.admitOpener(ctx, state)(h)
	if err == nil {
		w.admitKept[p] = old != nil && p.Policy.Loaded()
	}
	return p, err
}

// prepare tells a namespace's policies of it that do not act for it yet, and makes its new classes where its layout
// changes.
func (w *Swap) prepare(ctx context.Context, ns *Namespace) error {
	if a := w.admit.acting(w.admit.next.of(ns.Text)); a != ns.Admit.Now() {
		if err := a.Policy.Namespace(ns.ID, ns.Text); err != nil {
			return err
		}
	}
	var plans []*kv.Plan
	if l := w.layout.acting(w.layout.next.of(ns.Text)); l != ns.Layout.Now() && ns.groups != nil {
		var err error
		if plans, err = ns.makePlans(ctx, w.c.opt.Roots, ns.groups, l); err != nil {
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

// Abandon closes what was opened.
func (w *Swap) Abandon() {
	for _, cl := range w.made {
		cl.Release()
	}
	for _, s := range w.place.opened {
		_ = s.policy.close()
	}
	for _, s := range w.layout.opened {
		_ = s.policy.close()
	}
	for _, s := range w.admit.opened {
		_ = s.policy.close()
	}
}

// Commit replaces the policies. Pieces that are there keep their names and plans.
func (w *Swap) Commit() (list []Swapped) {
	c := w.c
	admits, layouts, places := w.admit.commit(), w.layout.commit(), w.place.commit()
	c.admit.Store(&w.admit.next)
	c.layout.Store(&w.layout.next)
	c.place.Store(&w.place.next)
	c.mu.Lock()
	for _, ns := range c.byDigest {
		ns.bind(c)
		if !w.seen[ns] { // a scan, or another host, has found its first piece meanwhile
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
		list = append(list, Swapped{Role: abi.RoleAdmit, From: p.old.Module.Digest(), Loaded: w.admitKept[p.by]})
		_ = p.old.close()
	}
	for _, p := range places {
		list = append(list, Swapped{Role: abi.RolePlace, From: p.old.Module.Digest()})
		_ = p.old.close()
	}
	for _, p := range layouts {
		list = append(list, Swapped{Role: abi.RoleLayout, From: p.old.Module.Digest()})
		_ = p.old.close()
	}
	return list
}
