package catalog

import (
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// wish is a rule and the policy that is to act for what it matches. The handle is borrowed.
type wish struct {
	name   string
	rule   *Rule // nil: all that is left
	handle *policy.Handle
}

// wishes are those of a role, the one for the rest last.
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

// rebinding is a change of a role's bindings, ready to be committed.
type rebinding[T any] struct {
	next   Bindings[T]
	opened []successor[T]
	ended  []*Binding[T] // that next does not have
}

// successor is a policy that was opened for a binding.
type successor[T any] struct {
	binding *Binding[T]
	policy  *T
	follows bool // another acts in the binding until the change is committed
}

// acting is the policy that acts in a binding once the change is committed.
func (r *rebinding[T]) acting(b *Binding[T]) *T {
	for _, s := range r.opened {
		if s.binding == b {
			return s.policy
		}
	}
	return b.Now()
}

// rebind opens the policies that a role lacks for its wishes. Those that act already stay as they are, and rules that name
// one policy share it. It returns those that it opened also with an error. open gets the policy that is succeeded, or nil.
func rebind[T any](
	now Bindings[T], role abi.Role, list []wish, handle func(*T) *policy.Handle, open func(h *policy.Handle, old *T) (*T, error),
) (r rebinding[T], err error) {
	for _, w := range list {
		b := r.next.named(w.name)
		if b == nil {
			if b, err = r.bind(now.named(w.name), role, w, handle, open); err != nil {
				return r, err
			}
		}
		r.next = append(r.next, boundRule[T]{b, w.rule})
	}
	for b := range now.Each() {
		if !r.next.has(b) {
			r.ended = append(r.ended, b)
		}
	}
	return r, nil
}

// bind is the binding for a wish: b, the one of its name, if there is one.
func (r *rebinding[T]) bind(
	b *Binding[T], role abi.Role, w wish, handle func(*T) *policy.Handle, open func(h *policy.Handle, old *T) (*T, error),
) (*Binding[T], error) {
	h := w.handle
	if h == nil {
		h = policy.BuiltinHandle(role)
		defer h.Release()
	}
	var old *T
	if b != nil {
		if old = b.Now(); handle(old) == h || w.handle == nil && handle(old).Module.Digest() == h.Module.Digest() {
			return b, nil
		}
	}
	p, err := open(h, old)
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", h.Label, err)
	}
	follows := b != nil
	if !follows {
		b = &Binding[T]{Name: h.Label}
		b.now.Store(p)
	}
	r.opened = append(r.opened, successor[T]{b, p, follows})
	return b, nil
}

// replaced is a policy that acts no more, and the one that follows it, or nil.
type replaced[T any] struct{ old, by *T }

// commit lets the policies that were opened act, and returns those that act no more.
func (r *rebinding[T]) commit() (list []replaced[T]) {
	for _, s := range r.opened {
		if s.follows {
			list = append(list, replaced[T]{s.binding.now.Swap(s.policy), s.policy})
		}
	}
	for _, b := range r.ended {
		list = append(list, replaced[T]{old: b.Now()})
	}
	return list
}
