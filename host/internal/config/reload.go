package config

import (
	"maps"
	"reflect"
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
	if !reflect.DeepEqual(old.Policies, next.Policies) {
		add("policy", true)
	}
	if !reflect.DeepEqual(old.Tenants, next.Tenants) {
		add("tenant", true)
	}
	compareAll("expiry", expiryKeys, old.Expiries, next.Expiries, add)
	compareAll("compression", compressionKeys, old.Compressions, next.Compressions, add)
	for i := range max(len(old.Roots), len(next.Roots)) {
		at := "root[" + strconv.Itoa(i) + "]"
		if i >= min(len(old.Roots), len(next.Roots)) {
			add(at, false)
			continue
		}
		o := &old.Roots[i]
		compare(at, rootKeys, o, &next.Roots[i], func(key string, reload bool) {
			add(key, reload)
			if last := &list[len(list)-1]; strings.HasSuffix(key, ".capacity") && (o.Shared || o.InMemory()) {
				last.Restart = "needs a restart where the root is shared or in memory"
			}
		})
	}
	return list
}

// compareAll compares two array tables whose number of elements needs a restart.
func compareAll[E any, P interface {
	*E
	value(key string) any
}](array string, keys []Field, old, next []E, add func(key string, reload bool)) {
	for i := range max(len(old), len(next)) {
		if at := array + "[" + strconv.Itoa(i) + "]"; i >= min(len(old), len(next)) {
			add(at, false)
		} else {
			compare(at, keys, P(&old[i]), P(&next[i]), add)
		}
	}
}

// compare compares two elements of an array table.
func compare[T interface{ value(key string) any }](at string, keys []Field, old, next T, add func(key string, reload bool)) {
	for _, k := range keys {
		if !reflect.DeepEqual(old.value(k.Name), next.value(k.Name)) {
			add(at+"."+k.Name, k.Reload)
		}
	}
}

func (r *Root) value(key string) any {
	return map[string]any{
		"path": r.Path, "capacity": r.Capacity, "level": r.Level, "write": r.Through, "evict": r.Evict, "shared": r.Shared,
		"require_mount": r.RequireMount, "route": r.Route, "min_free": r.MinFree, "daily_writes": r.DailyWrites,
	}[key]
}

func (e *Expiry) value(key string) any { return map[string]any{"model": e.Model, "ttl": e.TTL}[key] }
