package config

import (
	"maps"
	"reflect"
	"strconv"
	"strings"
)

// Change is a key with different values in two configurations.
type Change struct {
	Key     string
	Restart string // why a running host cannot change it; empty if it can
}

const needsRestart = "needs a restart"

// Changes compares two configurations. Roots are compared in the order in which they are configured.
func Changes(old, next *Config) (list []Change) {
	add := func(key string, reload bool) {
		c := Change{Key: key}
		if !reload {
			c.Restart = needsRestart
		} else if index, _, capacity := strings.Cut(strings.TrimPrefix(key, "root["), "].capacity"); capacity {
			i, _ := strconv.Atoi(index)
			if old.Roots[i].Shared || old.Roots[i].takesMemory() {
				c.Restart = "needs a restart where the root is shared or in memory"
			}
		}
		list = append(list, c)
	}
	for _, k := range keys {
		if k.text(k.field(old)) != k.text(k.field(next)) {
			add(k.Path(), k.Reload)
		}
	}
	if !maps.Equal(old.Session.Pins, next.Session.Pins) {
		add(pinsPath, false)
	}
	for _, a := range arrays {
		a.changes(old, next, add)
	}
	return list
}

// changes lists the keys of elements with different values. Added and removed elements need a restart, unless the whole array
// can be reloaded.
func (a *array) changes(old, next *Config, add func(key string, reload bool)) {
	was, is := a.list(old), a.list(next)
	if a.reload {
		if !reflect.DeepEqual(was.Interface(), is.Interface()) {
			add(a.name, true)
		}
		return
	}
	for i := range max(was.Len(), is.Len()) {
		if i >= min(was.Len(), is.Len()) {
			add(a.at(i), false)
			continue
		}
		for _, k := range a.keys {
			if k.toml(was.Index(i).FieldByIndex(k.index)) != k.toml(is.Index(i).FieldByIndex(k.index)) {
				add(a.at(i)+"."+k.Name, k.Reload)
			}
		}
	}
}
