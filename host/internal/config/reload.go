package config

import (
	"maps"
	"strconv"
	"strings"
)

// Change is a key that two configurations have different values of.
type Change struct {
	Key     string
	Restart string // why a running host cannot change it; empty: it can
}

const needsRestart = "needs a restart"

// Changes compares two configurations. Root directories are compared in the order that they are configured in.
func Changes(old, next *Config) (list []Change) {
	add := func(key string, reload bool) {
		c := Change{Key: key}
		if !reload {
			c.Restart = needsRestart
		}
		list = append(list, c)
	}
	for _, k := range keys {
		if k.text(old) == k.text(next) {
			continue
		}
		add(k.Path(), k.Reload)
	}
	if !maps.Equal(old.Session.Pins, next.Session.Pins) {
		add(pinsPath, false)
	}
	if policies.differ(old, next) {
		add(policies.array, true)
	}
	if tenants.differ(old, next) {
		add(tenants.array, true)
	}
	expiries.changes(old, next, add)
	compressions.changes(old, next, add)
	roots.changes(old, next, func(key string, reload bool) {
		add(key, reload)
		index, _, capacity := strings.Cut(strings.TrimPrefix(key, "root["), "].capacity")
		if i, err := strconv.Atoi(index); capacity && err == nil && (old.Roots[i].Shared || old.Roots[i].takesMemory()) {
			list[len(list)-1].Restart = "needs a restart where the root is shared or in memory"
		}
	})
	return list
}
