package catalog

import (
	"context"
	"iter"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// Policies are those that are bound to namespaces. A namespace gets the policy of the first rule with the role that
// matches it, and the role's own field where none does. The handles are borrowed; a nil handle is the built-in policy.
type Policies struct {
	Admit, Place, Layout *policy.Handle
	Rules                []Rule
}

// Rule binds a policy for admit, place or layout to namespaces.
type Rule struct {
	Role       abi.Role
	Namespaces []kv.Pattern // any of them
	Policy     *policy.Handle
}

func (r *Rule) matches(text string) bool {
	return slices.ContainsFunc(r.Namespaces, func(p kv.Pattern) bool { return p.Matches(text) })
}

// Active is a running policy and the module that it comes from.
type Active[P interface{ Close() error }] struct {
	*policy.Handle
	Policy P
	Since  time.Time
}

func handleOf[P interface{ Close() error }](a *Active[P]) *policy.Handle { return a.Handle }

// close closes the policy and releases its module.
func (a *Active[P]) close() error {
	err := a.Policy.Close()
	a.Release()
	return err
}

type (
	// Admission is an admit policy.
	Admission = Active[*policy.Admit]
	// Placement is a place policy.
	Placement = Active[*policy.Place]
	// Layout is a layout policy.
	Layout = Active[*policy.Layout]
)

// Binding is what namespaces are bound to: a name, under which one policy can follow another.
type Binding[T any] struct {
	Name string
	now  atomic.Pointer[T]
}

// Now is the policy that acts under the name.
func (b *Binding[T]) Now() *T { return b.now.Load() }

// Bindings are those of one role, in the order of the rules. The last one is for the rest.
type Bindings[T any] []boundRule[T]

type boundRule[T any] struct {
	*Binding[T]
	rule *Rule // nil: all that is left
}

// of is the binding that a namespace gets.
func (l Bindings[T]) of(text string) *Binding[T] {
	for _, b := range l {
		if b.rule == nil || b.rule.matches(text) {
			return b.Binding
		}
	}
	panic("catalog: a role without a policy for the rest")
}

// named returns a binding, or nil.
func (l Bindings[T]) named(name string) *Binding[T] {
	for _, b := range l {
		if b.Name == name {
			return b.Binding
		}
	}
	return nil
}

// has says whether a binding is in the list.
func (l Bindings[T]) has(b *Binding[T]) bool {
	return slices.ContainsFunc(l, func(o boundRule[T]) bool { return o.Binding == b })
}

// Each yields every binding once.
func (l Bindings[T]) Each() iter.Seq[*Binding[T]] {
	return func(yield func(*Binding[T]) bool) {
		for i, b := range l {
			seen := slices.ContainsFunc(l[:i], func(o boundRule[T]) bool { return o.Binding == b.Binding })
			if !seen && !yield(b.Binding) {
				return
			}
		}
	}
}

// bound is what a namespace is bound to now.
type bound[T any] struct{ binding atomic.Pointer[Binding[T]] }

// Now is the policy that acts for the namespace.
func (b *bound[T]) Now() *T { return b.binding.Load().Now() }

func (o *Options) admitOpener(ctx context.Context, state policy.State) func(*policy.Handle) (*Admission, error) {
	return func(h *policy.Handle) (*Admission, error) {
		p, err := h.Module.NewAdmit(ctx, policy.AdmitOptions{
			Capacity: o.Capacity, Seed: o.Seed, Config: h.Config, MaxNamespaces: MaxNamespaces, State: state,
		})
		if err != nil {
			return nil, err
		}
		return &Admission{Handle: h.Acquire(), Policy: p, Since: o.Now()}, nil
	}
}

func (o *Options) placeOpener(ctx context.Context) func(*policy.Handle) (*Placement, error) {
	return func(h *policy.Handle) (*Placement, error) {
		p, err := h.Module.NewPlace(ctx, policy.PlaceOptions{Seed: o.Seed, Config: h.Config, MaxNamespaces: MaxNamespaces})
		if err != nil {
			return nil, err
		}
		return &Placement{Handle: h.Acquire(), Policy: p, Since: o.Now()}, nil
	}
}

func (o *Options) layoutOpener(ctx context.Context) func(*policy.Handle) (*Layout, error) {
	return func(h *policy.Handle) (*Layout, error) {
		p, err := h.Module.NewLayout(ctx, policy.LayoutOptions{Seed: o.Seed, Config: h.Config, MaxNamespaces: MaxNamespaces})
		if err != nil {
			return nil, err
		}
		return &Layout{Handle: h.Acquire(), Policy: p, Since: o.Now()}, nil
	}
}
