package catalog

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
)

// Swap is a change of policies that are bound to namespaces, ready to be committed.
type Swap struct {
	c         *Catalog
	admitOf   *Binding[Admission]
	admit     *Admission
	layoutOf  *Binding[Layout]
	layout    *Layout
	placeOf   *Binding[PlaceGeneration]
	place     *PlaceGeneration
	made      []*Class
	admitKept bool
}

// Swapped is one policy that was replaced.
type Swapped struct {
	Role    abi.Role
	From    string // the module's digest
	Entries int    // of place: those whose files the replaced policy named
	Loaded  bool   // of admit: the new policy took over the state
}

// PrepareSwap opens the policies that replace those of a name, tells them of the namespaces, and makes the classes that
// new pieces get. Commit or Abandon must follow, also when there is an error. The caller holds Lock until then.
// maxState bounds the state that an admit policy hands over.
func (c *Catalog) PrepareSwap(
	ctx context.Context, name string, next *[abi.Roles]*policy.Handle, maxState uint32,
) (*Swap, error) {
	w := &Swap{c: c}
	if h := next[abi.RoleAdmit]; h != nil {
		if w.admitOf = c.admit.named(name); w.admitOf == nil {
			return w, fmt.Errorf("%w: admit policy %s", ErrNoPolicy, name)
		}
		if err := w.openAdmit(ctx, h, maxState); err != nil {
			return w, fmt.Errorf("policy %s: %w", h.Label, err)
		}
	}
	var err error
	if h := next[abi.RoleLayout]; h != nil {
		if w.layoutOf = c.layout.named(name); w.layoutOf == nil {
			return w, fmt.Errorf("%w: layout policy %s", ErrNoPolicy, name)
		}
		if w.layout, err = c.opt.layoutOpener(ctx)(h); err != nil {
			return w, fmt.Errorf("policy %s: %w", h.Label, err)
		}
	}
	if h := next[abi.RolePlace]; h != nil {
		if w.placeOf = c.place.named(name); w.placeOf == nil {
			return w, fmt.Errorf("%w: place policy %s", ErrNoPolicy, name)
		}
		if w.place, err = c.opt.placeOpener(ctx, c.opt.Seed)(h); err == nil {
			err = w.place.files(c.opt.Roots.Keep)
		}
		if err != nil {
			return w, fmt.Errorf("policy %s: %w", h.Label, err)
		}
	}
	for _, ns := range c.Namespaces() {
		if err := w.makeClasses(ctx, ns); err != nil {
			return w, fmt.Errorf("namespace %s: %w", ns.Digest, err)
		}
	}
	return w, nil
}

// openAdmit hands over the state of the acting policy, if the new one can use it.
func (w *Swap) openAdmit(ctx context.Context, h *policy.Handle, maxState uint32) error {
	state, ok, err := w.admitOf.Now().Policy.Save(maxState)
	if err != nil || !ok {
		state = policy.State{} // it failed, or keeps none: the new one starts empty
	}
	if w.admit, err = w.c.opt.admitOpener(ctx, state)(h); err != nil {
		return err
	}
	w.admitKept = w.admit.Policy.Loaded()
	for _, ns := range w.c.Namespaces() {
		if ns.Admit == w.admitOf {
			if err := w.admit.Policy.Namespace(ns.ID, ns.Text); err != nil {
				return err
			}
		}
	}
	return nil
}

// makeClasses makes a namespace's new classes, where its place or layout changes.
func (w *Swap) makeClasses(ctx context.Context, ns *Namespace) error {
	var plans []*chunk.Plan
	if w.layout != nil && ns.Layout == w.layoutOf && ns.groups != nil {
		var err error
		if plans, err = ns.makePlans(ctx, w.c.opt.Roots, ns.groups, w.layout); err != nil {
			return err
		}
	}
	renamed := w.place != nil && ns.Place == w.placeOf
	if renamed {
		if err := w.place.Policy.Namespace(ns.ID, ns.Text); err != nil {
			return err
		}
	}
	for group, was := range *ns.current.Load() {
		place, plan := was.Place, was.Plan
		if renamed {
			place = w.place
		}
		for i := range plans {
			if ns.groups[i].ID == group && plans[i].Digest() != plan.Digest() {
				plan = plans[i]
			}
		}
		if place == was.Place && plan == was.Plan {
			continue
		}
		w.c.mu.Lock()
		cl, err := w.c.newClass(ns, group, place)
		w.c.mu.Unlock()
		if err != nil {
			return err
		}
		w.made = append(w.made, cl)
		if plan != nil {
			cl.setPlan(plan)
		}
	}
	return nil
}

// Abandon closes what PrepareSwap opened.
func (w *Swap) Abandon() {
	for _, cl := range w.made {
		cl.Release()
	}
	if w.place != nil {
		w.c.releaseGeneration(w.place)
	}
	if w.layout != nil {
		_ = w.layout.close()
	}
	if w.admit != nil {
		_ = w.admit.close()
	}
}

// Commit replaces the policies. Pieces that are there keep their names and plans, and the module that named them stays
// until the last of them is gone. rename is called between the change of a place policy and that of the classes, if
// there is one.
func (w *Swap) Commit(rename func()) (list []Swapped) {
	c := w.c
	if w.admit != nil {
		old := w.admitOf.now.Swap(w.admit)
		list = append(list, Swapped{Role: abi.RoleAdmit, From: old.Module.Digest(), Loaded: w.admitKept})
		_ = old.close()
	}
	var renamed *PlaceGeneration
	if w.place != nil {
		renamed = w.placeOf.now.Swap(w.place)
		rename()
	}
	c.mu.Lock()
	for _, cl := range w.made {
		c.setCurrent(cl)
	}
	c.mu.Unlock()
	if w.place != nil {
		list = append(list, Swapped{Role: abi.RolePlace, From: renamed.Module.Digest(), Entries: int(c.Entries(renamed))})
		c.releaseGeneration(renamed)
	}
	if w.layout != nil {
		old := w.layoutOf.now.Swap(w.layout)
		list = append(list, Swapped{Role: abi.RoleLayout, From: old.Module.Digest()})
		_ = old.close()
	}
	return list
}
