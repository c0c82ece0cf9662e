package store

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
)

// Use is a module in a role, with its settings. The zero value is the built-in policy.
type Use struct {
	Name   string         // what operators call it; empty: as the module
	Module *policy.Module // nil: the built-in one
	Config policy.Config
	Done   func() // called once, when the store needs the module no more; optional
}

func (u Use) or(role abi.Role) Use {
	if u.Module == nil {
		u.Module = policy.Builtin(role)
	}
	if u.Name == "" {
		u.Name = u.Module.Name()
	}
	return u
}

// Policies say who decides. Evict is bound to roots, the other roles to namespaces: a namespace gets the policy of the
// first rule with the role that matches it, and the role's own field where none does.
type Policies struct {
	Evict, Admit, Place, Layout Use
	Rules                       []Rule
	Shadows                     []Shadow
	// Reopen says how modules that named files in an earlier run are opened again; see naming.
	Reopen policy.Options
}

// Rule binds a policy for admit, place or layout to namespaces.
type Rule struct {
	Role       abi.Role
	Namespaces []chunk.Pattern // any of them
	Use        Use
}

func (r *Rule) matches(text string) bool {
	return slices.ContainsFunc(r.Namespaces, func(p chunk.Pattern) bool { return p.Matches(text) })
}

// bound is a module in use, with the number of those who use it.
type bound struct {
	Use
	role  abi.Role
	since time.Time
	users atomic.Int32
}

func (s *Store) bind(role abi.Role, u Use) *bound {
	return &bound{Use: u.or(role), role: role, since: s.cfg.Now()}
}

func (b *bound) hold() *bound {
	b.users.Add(1)
	return b
}

func (b *bound) release() {
	if b.users.Add(-1) == 0 && b.Done != nil {
		b.Done()
	}
}

// opened is a running policy and the module that it comes from.
type opened[P any] struct {
	*bound
	policy P
}

// office is what a namespace is bound to: by name, so that who holds it can change.
type office[T any] struct {
	name string
	now  atomic.Pointer[T]
}

// seat is an office in the order of the rules; the last one is for the rest.
type seat[T any] struct {
	*office[T]
	rule *Rule // nil: all that is left
}

// offices are those of one role.
type offices[T any] []seat[T]

// of is the office that a namespace is bound to.
func (o offices[T]) of(text string) *office[T] {
	for _, e := range o {
		if e.rule == nil || e.rule.matches(text) {
			return e.office
		}
	}
	panic("store: a role without a policy for the rest")
}

// named finds an office, or nil.
func (o offices[T]) named(name string) *office[T] {
	for _, e := range o {
		if e.name == name {
			return e.office
		}
	}
	return nil
}

// each visits every office once.
func (o offices[T]) each(visit func(*office[T])) {
	for i, e := range o {
		if !slices.ContainsFunc(o[:i], func(b seat[T]) bool { return b.office == e.office }) {
			visit(e.office)
		}
	}
}

// openOffices opens the policies of a role. Rules that name one policy share it. Those opened are in the answer also when
// there is an error.
func openOffices[T any](s *Store, role abi.Role, rest Use, open func(*bound) (*T, error)) (o offices[T], err error) {
	add := func(u Use, rule *Rule) error {
		u = u.or(role)
		of := o.named(u.Name)
		if of == nil {
			p, err := open(s.bind(role, u))
			if err != nil {
				return fmt.Errorf("store: policy %s: %w", u.Name, err)
			}
			of = &office[T]{name: u.Name}
			of.now.Store(p)
		} else if u.Done != nil {
			u.Done() // the office has it already
		}
		o = append(o, seat[T]{of, rule})
		return nil
	}
	for i := range s.cfg.Policies.Rules {
		if r := &s.cfg.Policies.Rules[i]; r.Role == role {
			if err := add(r.Use, r); err != nil {
				return o, err
			}
		}
	}
	return o, add(rest, nil)
}

type (
	admission = opened[*policy.Admit]
	arranger  = opened[*policy.Layout]
)

func (s *Store) openAdmission(ctx context.Context, state policy.State) func(*bound) (*admission, error) {
	var capacity uint64
	for _, r := range s.cfg.Roots {
		capacity += uint64(r.Capacity)
	}
	return func(b *bound) (*admission, error) {
		p, err := b.Module.NewAdmit(ctx, policy.AdmitOptions{
			Capacity: capacity, Seed: s.cfg.Seed, Config: b.Config, MaxNamespaces: maxNamespaces, State: state,
		})
		if err != nil {
			return nil, err
		}
		return &admission{b.hold(), p}, nil
	}
}

func (s *Store) openArranger(ctx context.Context) func(*bound) (*arranger, error) {
	return func(b *bound) (*arranger, error) {
		p, err := b.Module.NewLayout(ctx, policy.LayoutOptions{Seed: s.cfg.Seed, Config: b.Config, MaxNamespaces: maxNamespaces})
		if err != nil {
			return nil, err
		}
		return &arranger{b.hold(), p}, nil
	}
}
