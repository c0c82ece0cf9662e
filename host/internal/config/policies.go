package config

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
)

// Label returns the name of the i-th policy, or the name of its module. If an earlier policy has that name, a number is
// appended.
func (c *Config) Label(i int) string {
	p := &c.Policies[i]
	if p.Name != "" {
		return p.Name
	}
	base := strings.TrimSuffix(filepath.Base(p.Module), ".wasm")
	label := base
	for n := 2; slices.ContainsFunc(c.labels(i), func(l string) bool { return l == label }); n++ {
		label = fmt.Sprintf("%s-%d", base, n)
	}
	return label
}

// labels returns the labels that the i-th policy must not have: those of earlier policies, and explicit names of later ones.
func (c *Config) labels(i int) (list []string) {
	for k := range c.Policies {
		switch {
		case k < i:
			list = append(list, c.Label(k))
		case c.Policies[k].Name != "" && k != i:
			list = append(list, c.Policies[k].Name)
		}
	}
	return list
}

// Labelled returns the policy with a label, or nil.
func (c *Config) Labelled(label string) *Policy {
	for i := range c.Policies {
		if c.Label(i) == label {
			return &c.Policies[i]
		}
	}
	return nil
}

// EvictsByName reports whether a root names the i-th policy.
func (c *Config) EvictsByName(i int) bool {
	label := c.Label(i)
	return slices.ContainsFunc(c.Roots, func(r Root) bool { return r.Evict == label })
}

func (c *Config) validatePolicies(bad func(wrong bool, path, format string, args ...any)) {
	rest := map[string]string{}
	for i, p := range c.Policies {
		at := "policy[" + strconv.Itoa(i) + "]"
		bad(p.Module == "", at+".module", "no module: want the path of a .wasm file, or the name of an embedded one")
		bad(p.Name != "" && slices.Contains(c.labels(i), p.Name), at+".name", "two policies are called %q", p.Name)
		for _, role := range p.Roles {
			if _, err := abi.ParseRole(role); err != nil {
				bad(true, at+".roles", "unknown role %q (evict, admit, place, layout)%s", role, Suggest(role, roleNames()))
				continue
			}
			if evict := role == abi.RoleEvict.String(); p.Shadow || evict && c.EvictsByName(i) || !evict &&
				len(p.Namespaces) > 0 {
				continue
			}
			if other, ok := rest[role]; ok {
				bad(true, at+".roles",
					"role %s is taken by %s already; bind one of them (namespaces = [...], or evict = \"...\" of a root)",
					role, other)
			}
			rest[role] = p.Module
		}
		for _, n := range p.Levels {
			bad(n > maxLevel, at+".levels", "%d, want 0 (nearest) to %d", n, maxLevel)
		}
		if _, err := kv.ParsePatterns(p.Namespaces); err != nil {
			bad(true, at+".namespaces", "%v", err)
		}
		p.validateShadow(at, c.EvictsByName(i), bad)
		p.validate(at, bad)
		for _, grant := range p.Grants {
			bad(!slices.Contains(grants, grant), at+".grants", "unknown grant %q%s", grant, Suggest(grant, grants))
		}
	}
	for i, r := range c.Roots {
		if r.Evict != "" && c.Labelled(r.Evict) == nil {
			var labels []string
			for k := range c.Policies {
				labels = append(labels, c.Label(k))
			}
			bad(true, "root["+strconv.Itoa(i)+"].evict", "no policy is called %q%s", r.Evict, Suggest(r.Evict, labels))
		}
	}
}

func (p *Policy) validateShadow(at string, named bool, bad func(wrong bool, path, format string, args ...any)) {
	switch {
	case p.Capacity < 0:
		bad(true, at+".capacity", "%d is negative", p.Capacity)
	case p.Capacity != 0 && !p.Shadow:
		bad(true, at+".capacity", "only a shadow has one (shadow = true)")
	case p.Shadow && named:
		bad(true, at+".shadow", "a root names it to evict, and a shadow decides nothing")
	case p.Shadow && len(p.Namespaces) > 0:
		bad(true, at+".namespaces", "a shadow sees all namespaces")
	case p.Shadow && slices.ContainsFunc(p.Roles, func(r string) bool { return r != abi.RoleEvict.String() }):
		bad(true, at+".roles", "a shadow can only evict")
	}
}
