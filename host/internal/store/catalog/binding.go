package catalog

import (
	"errors"
	"iter"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// Policies are the policies to bind to namespaces. A namespace gets the policy of the first rule of a role that matches it, and
// the role's own field if none matches. The handles are borrowed. A nil handle stands for the built-in policy.
type Policies struct {
	Admit, Place, Layout *policy.Handle
	Rules                []Rule
}

// Rule binds a policy of the role admit, place or layout to namespaces.
type Rule struct {
	Role       abi.Role
	Namespaces []kv.Pattern // a namespace must match one of them
	Policy     *policy.Handle
}

func (r *Rule) matches(text string) bool {
	return slices.ContainsFunc(r.Namespaces, func(p kv.Pattern) bool { return p.Matches(text) })
}

// running is a policy of any role.
type running interface {
	Close() error
	Stats() policy.Stats
}

// Active is a running policy with the module that it comes from.
type Active[P running] struct {
	*policy.Handle
	Policy P
	Since  time.Time
}

// close closes the policy and releases its module.
func (a *Active[P]) close() error {
	err := a.Policy.Close()
	a.Release()
	return err
}

// Binding is a policy name to which namespaces are bound. One policy can replace another under the same name.
type Binding[P running] struct {
	Name string
	now  atomic.Pointer[Active[P]]
}

// Now returns the current policy of the binding.
func (b *Binding[P]) Now() *Active[P] { return b.now.Load() }

// Bindings are the bindings of one role in the order of the rules. The last one applies to all other namespaces.
type Bindings[P running] []boundRule[P]

type boundRule[P running] struct {
	*Binding[P]
	rule *Rule // nil in the last element, which matches all namespaces
}

// of returns the binding for a namespace, given its text.
func (l Bindings[P]) of(text string) *Binding[P] {
	for _, b := range l {
		if b.rule == nil || b.rule.matches(text) {
			return b.Binding
		}
	}
	panic("catalog: a role without a policy for the rest")
}

// named returns a binding by its name, or nil.
func (l Bindings[P]) named(name string) *Binding[P] {
	for _, b := range l {
		if b.Name == name {
			return b.Binding
		}
	}
	return nil
}

// has reports whether a binding is in the list.
func (l Bindings[P]) has(b *Binding[P]) bool {
	return slices.ContainsFunc(l, func(o boundRule[P]) bool { return o.Binding == b })
}

func (l Bindings[P]) Each() iter.Seq[*Binding[P]] {
	return func(yield func(*Binding[P]) bool) {
		for i, b := range l {
			if !l[:i].has(b.Binding) && !yield(b.Binding) {
				return
			}
		}
	}
}

func (l Bindings[P]) close() (err error) {
	for b := range l.Each() {
		err = errors.Join(err, b.Now().close())
	}
	return err
}

func (l Bindings[P]) visit(visit func(PolicyInfo)) {
	for b := range l.Each() {
		a := b.Now()
		visit(PolicyInfo{Handle: a.Handle, Since: a.Since, Stats: a.Policy.Stats()})
	}
}

// bound is the current binding of a namespace.
type bound[P running] struct{ binding atomic.Pointer[Binding[P]] }

// Now returns the current policy of the namespace.
func (b *bound[P]) Now() *Active[P] { return b.binding.Load().Now() }
