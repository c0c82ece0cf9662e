package storetest

import (
	"fmt"
	"slices"
)

// Kind is a sort of history: how many hosts there are on how many roots, and what can happen to them.
type Kind struct {
	Name   string
	hosts  int // two or more share a root
	roots  int
	faults string // rules, with a seed each
	power  bool   // the machine can lose its power
	lives  bool   // short lives that end badly; what was durable must be there in the next
	many   bool   // clients at the same time
	pauses bool   // operations on files that do not go on before their host has been given up
	memory bool   // the roots are in memory, which outlives the hosts
	levels bool   // each root is a level of its own
	stored bool   // the first root, the third and so on hold compressed pieces
	before bool   // of stored: the second root, the fourth and so on do, and the first must not
}

// exact says that a file which is removed stays so, and that what a lease is on cannot fail.
func (k *Kind) exact() bool { return k.faults == "" && !k.power }

// concurrent says that several clients or hosts are at work at the same time.
func (k *Kind) concurrent() bool { return k.many || k.hosts > 1 || k.levels && k.faults != "" }

// Kinds are all kinds of histories. The kind of a seed is its remainder.
func Kinds() []Kind { return slices.Clone(kinds) }

var kinds = []Kind{
	{Name: "clean", hosts: 1, roots: 1},
	{Name: "faults", hosts: 1, roots: 1, faults: ownFaults},
	{Name: "shared", hosts: 2, roots: 1},
	{Name: "two-roots", hosts: 1, roots: 2},
	{Name: "power", hosts: 1, roots: 1, power: true},
	{Name: "shared-with-faults", hosts: 2, roots: 1, faults: sharedFaults},
	{Name: "many-clients", hosts: 1, roots: 2, many: true},
	{Name: "two-roots-with-faults", hosts: 1, roots: 2, faults: ownFaults},
	{Name: "shared-by-many-clients", hosts: 2, roots: 1, many: true},
	{Name: "memory", hosts: 1, roots: 2, memory: true},
	{Name: "shared-by-many-clients-with-faults", hosts: 3, roots: 1, faults: sharedFaults, many: true},
	{Name: "shared-with-pauses", hosts: 2, roots: 1, pauses: true},
	{Name: "shared-by-many-clients-with-pauses", hosts: 3, roots: 1, many: true, pauses: true},
	{Name: "power-losses", hosts: 1, roots: 1, power: true, lives: true},
	{Name: "levels", hosts: 1, roots: 2, levels: true},
	{Name: "levels-with-faults", hosts: 1, roots: 3, levels: true, faults: ownFaults},
	{Name: "levels-by-many-clients", hosts: 1, roots: 3, levels: true, many: true},
	{Name: "compressed-with-faults", hosts: 1, roots: 2, stored: true, faults: ownFaults},
	{Name: "compressed-with-power-losses", hosts: 1, roots: 1, stored: true, power: true, lives: true},
	{Name: "compressed-levels", hosts: 1, roots: 3, stored: true, levels: true},
	{Name: "compressed-levels-behind-memory", hosts: 1, roots: 3, stored: true, before: true, levels: true},
	{Name: "levels-with-power-losses", hosts: 1, roots: 2, levels: true, power: true},
	{Name: "compressed-shared-with-faults", hosts: 2, roots: 1, stored: true, faults: sharedFaults},
	{Name: "compressed-shared-by-many-clients-with-pauses", hosts: 3, roots: 1, stored: true, many: true, pauses: true},
}

func kindNamed(name string) (Kind, error) {
	for _, k := range kinds {
		if k.Name == name {
			return k, nil
		}
	}
	return Kind{}, fmt.Errorf("no such kind of history: %q", name)
}

// These rules affect a few in a hundred calls of each sort.
const (
	ownFaults = `
write ** 2%% seed %d: enospc
write ** 1%% seed %d: short
publish ** 3%% seed %d: eio
publish ** 3%% seed %d: eio after
remove ** 2%% seed %d: eio
remove ** 2%% seed %d: eio after
open **_r* 1%% seed %d: emfile
open **.tmp 1%% seed %d: eio after
sync ** 3%% seed %d: eio
syncdir ** 2%% seed %d: eio
close ** 1%% seed %d: eio after
stat **_r* 1%% seed %d: estale
read ** 1%% seed %d: eio
`
	sharedFaults = `
write **.tmp 2%% seed %d: enospc
link ** 3%% seed %d: eio
link ** 3%% seed %d: eio after
remove ** 2%% seed %d: eio
remove ** 2%% seed %d: eio after
rename ** 1%% seed %d: eio
rename ** 1%% seed %d: eio after
open **_r* 1%% seed %d: emfile
open **.tmp 1%% seed %d: eio after
write **/log.* 1%% seed %d: eio
readdir **/shared/** 1%% seed %d: estale
stat **_r* 1%% seed %d: eio
`
)
