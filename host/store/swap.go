package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/evictor"
)

// Swap is a change of policies while the store is at work.
type Swap struct {
	From string          // whose place is taken: the name of a policy; empty, for evict: whoever acts
	Uses [abi.Roles]*Use // what comes, by role; nil leaves the role as it is
	Root string          // where evict is changed; empty: in every root where From acts
}

// Taken is one place that a policy took over.
type Taken struct {
	Role     abi.Role
	Root     string         // of evict
	From     string         // the module's digest
	Handover evictor.Method // how it learned what is there
	Entries  int            // of the root, or of the classes that the replaced naming still has
	Took     time.Duration  // beside the work of all others
}

// Swap replaces policies under load. Everything that can fail is done beside the acting ones, which go on until all is
// ready; when something does, or the policy fails at the last moment in one of its roots, all is as before. Each Use's Done is
// called when the store needs its module no more, also when the swap failed. It waits for scans, until the context is done.
func (s *Store) Swap(ctx context.Context, w Swap) (taken []Taken, err error) {
	if err := s.swapping.Acquire(ctx, 1); err != nil {
		w.drop()
		return nil, err
	}
	defer s.swapping.Release(1)
	if s.closed.Load() {
		w.drop()
		return nil, ErrClosed
	}
	var next [abi.Roles]*bound
	for role, u := range w.Uses {
		if u != nil {
			next[role] = s.bind(abi.Role(role), *u).hold()
			defer next[role].release()
		}
	}
	begun := time.Now()
	changes, err := s.prepareEvict(ctx, &w, next[abi.RoleEvict])
	defer func() {
		for _, c := range changes {
			c.Abandon()
		}
	}()
	if err != nil {
		return nil, err
	}
	if err := s.opening.Acquire(ctx, 1); err != nil { // what is announced and planned below is all there is
		return nil, err
	}
	defer s.opening.Release(1)
	r, err := s.prepareRest(ctx, w.From, &next)
	if err != nil {
		r.abandon()
		return nil, err
	}
	all := changes
	changes = nil
	if taken, err = takeAll(all); err != nil {
		r.abandon()
		return nil, err
	}
	taken = append(taken, r.commit()...)
	for _, c := range all {
		c.Keep()
	}
	for i := range taken {
		taken[i].Took = time.Since(begun)
	}
	return taken, nil
}

// takeAll lets a policy decide in all its roots, or in none.
func takeAll(changes []handover) (taken []Taken, err error) {
	for i, c := range changes {
		t := Taken{Role: abi.RoleEvict, Root: c.r.dir, From: c.From().Module.Digest(), Handover: c.Method()}
		if t.Entries, err = c.take(); err != nil {
			for _, before := range changes[:i] {
				before.Undo()
			}
			for _, later := range changes[i+1:] {
				later.Abandon()
			}
			return nil, fmt.Errorf("store: root %s: policy %s: %w", c.r.dir, c.To().Label, err)
		}
		taken = append(taken, t)
	}
	return taken, nil
}

// drop gives back what the swap came with.
func (w *Swap) drop() {
	for _, u := range w.Uses {
		if u != nil && u.Done != nil {
			u.Done()
		}
	}
}

// prepareEvict gets a policy ready for its roots. Those that are ready are in the answer also when there is an error.
func (s *Store) prepareEvict(ctx context.Context, w *Swap, b *bound) (changes []handover, err error) {
	if b == nil {
		return nil, nil
	}
	to := b.evict()
	for _, r := range s.roots {
		from := r.activePolicy()
		if w.Root != "" && w.Root != r.dir || w.From != "" && w.From != from.Label {
			continue
		}
		c, err := r.evictor.Prepare(ctx, to, from)
		if err != nil {
			return changes, fmt.Errorf("store: root %s: policy %s: %w", r.dir, b.Name, err)
		}
		changes = append(changes, handover{c, r, c.Take})
	}
	if len(changes) == 0 {
		return nil, fmt.Errorf("%w: evict policy %s", ErrNoPolicy, cmp.Or(w.From, "of root "+w.Root))
	}
	return changes, nil
}

// handover is one of an evict policy in one root.
type handover struct {
	*evictor.Handover
	r    *root
	take func() (entries int, err error)
}

// activePolicy is what decides in a root, or did until it failed.
func (r *entries) activePolicy() *evictor.Policy {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.evictor.Active()
}

// reform is a change of the policies that are bound to namespaces, ready to be made.
type reform struct {
	s         *Store
	admitOf   *office[admission]
	admit     *admission
	layoutOf  *office[arranger]
	layout    *arranger
	placeOf   *office[naming]
	place     *naming
	made      []*class
	admitHand evictor.Method
}

// prepareRest opens them, tells them of the namespaces, and makes the classes that new pieces get.
func (s *Store) prepareRest(ctx context.Context, name string, next *[abi.Roles]*bound) (*reform, error) {
	f := &reform{s: s}
	if b := next[abi.RoleAdmit]; b != nil {
		if f.admitOf = s.admit.named(name); f.admitOf == nil {
			return f, fmt.Errorf("%w: admit policy %s", ErrNoPolicy, name)
		}
		if err := f.openAdmit(ctx, b); err != nil {
			return f, fmt.Errorf("store: policy %s: %w", b.Name, err)
		}
	}
	var err error
	if b := next[abi.RoleLayout]; b != nil {
		if f.layoutOf = s.layout.named(name); f.layoutOf == nil {
			return f, fmt.Errorf("%w: layout policy %s", ErrNoPolicy, name)
		}
		if f.layout, err = s.openArranger(ctx)(b); err != nil {
			return f, fmt.Errorf("store: policy %s: %w", b.Name, err)
		}
	}
	if b := next[abi.RolePlace]; b != nil {
		if f.placeOf = s.place.named(name); f.placeOf == nil {
			return f, fmt.Errorf("%w: place policy %s", ErrNoPolicy, name)
		}
		if f.place, err = s.openNaming(ctx)(b); err == nil {
			err = s.keepNaming(f.place)
		}
		if err != nil {
			return f, fmt.Errorf("store: policy %s: %w", b.Name, err)
		}
	}
	for _, ns := range s.spaces.list() {
		if err := f.reclass(ctx, ns); err != nil {
			return f, fmt.Errorf("store: namespace %s: %w", ns.digest, err)
		}
	}
	return f, nil
}

// openAdmit hands over what the acting policy knows, as far as the new one can use it.
func (f *reform) openAdmit(ctx context.Context, b *bound) error {
	state, ok, err := f.admitOf.now.Load().policy.Save(evictor.MaxHandoverState)
	if err != nil || !ok {
		state = policy.State{} // it failed, or keeps none: the new one starts empty
	}
	if f.admit, err = f.s.openAdmission(ctx, state)(b); err != nil {
		return err
	}
	if f.admit.policy.Loaded() {
		f.admitHand = evictor.Loaded
	}
	for _, ns := range f.s.spaces.list() {
		if ns.admit == f.admitOf {
			if err := f.admit.policy.Namespace(ns.id, ns.text); err != nil {
				return err
			}
		}
	}
	return nil
}

// reclass makes a namespace's new classes, where place or layout is another.
func (f *reform) reclass(ctx context.Context, ns *namespace) error {
	var plans []*chunk.Plan
	if f.layout != nil && ns.layout == f.layoutOf && ns.space != nil {
		var err error
		if plans, err = f.s.plansOf(ctx, ns, ns.space.groups, f.layout); err != nil {
			return err
		}
	}
	renamed := f.place != nil && ns.place == f.placeOf
	if renamed {
		if err := f.place.place.Namespace(ns.id, ns.text); err != nil {
			return err
		}
	}
	for group, was := range *ns.groups.Load() {
		names, plan := was.names, was.plan
		if renamed {
			names = f.place
		}
		for i := range plans {
			if ns.space.groups[i].ID == group && plans[i].Digest() != plan.Digest() {
				plan = plans[i]
			}
		}
		if names == was.names && plan == was.plan {
			continue
		}
		c, err := f.s.spaces.successor(was, names)
		if err != nil {
			return err
		}
		f.made = append(f.made, c)
		if plan != nil {
			c.lay(plan)
		}
	}
	return nil
}

func (f *reform) abandon() {
	for _, c := range f.made {
		c.drop()
	}
	if f.place != nil {
		f.place.drop()
	}
	if f.layout != nil {
		_ = f.layout.policy.Close()
		f.layout.release()
	}
	if f.admit != nil {
		_ = f.admit.policy.Close()
		f.admit.release()
	}
}

// commit makes the change. Pieces that are there keep their names and plans, and the module that worked the names out stays
// until the last of them has gone.
func (f *reform) commit() (taken []Taken) {
	s := f.s
	if f.admit != nil {
		old := f.admitOf.now.Swap(f.admit)
		taken = append(taken, Taken{Role: abi.RoleAdmit, From: old.Module.Digest(), Handover: f.admitHand})
		_ = old.policy.Close()
		old.release()
	}
	var renamed *naming
	if f.place != nil {
		renamed = f.placeOf.now.Swap(f.place)
		s.tellRoots()
	}
	s.spaces.electAll(f.made)
	if f.place != nil {
		taken = append(taken, Taken{Role: abi.RolePlace, From: renamed.Module.Digest(), Entries: int(s.entriesOf(renamed))})
		renamed.drop()
	}
	if f.layout != nil {
		old := f.layoutOf.now.Swap(f.layout)
		taken = append(taken, Taken{Role: abi.RoleLayout, From: old.Module.Digest()})
		_ = old.policy.Close()
		old.release()
	}
	return taken
}

// entriesOf counts the entries whose files a naming named, and the puts that are about to make one.
func (s *Store) entriesOf(n *naming) (entries int64) {
	for _, c := range s.spaces.live() {
		if c.names == n {
			entries += c.refs.Load()
			if c.ns.class(c.group) == c {
				entries--
			}
		}
	}
	return max(0, entries)
}

// list is the namespaces known now, in the order in which they came.
func (t *spaces) list() (list []*namespace) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, ns := range t.byID {
		list = append(list, ns)
	}
	slices.SortFunc(list, func(a, b *namespace) int { return cmp.Compare(a.id, b.id) })
	return list
}

// successor makes a class of the same group, under a naming.
func (t *spaces) successor(was *class, names *naming) (*class, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.newClass(was.ns, was.group, names)
}

func (t *spaces) electAll(made []*class) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range made {
		t.elect(c)
	}
}
