// Package policyset is the policies that a configuration names: opened, bound to roots and namespaces, and replaced
// while the host runs. [Open] opens them for the store's start; [Set.Swap], [Set.Promote] and [Set.Reload] change them
// afterwards.
//
// A module is open as long as there is a [policy.Handle] to it. The set holds one for the module that is active
// under each label, so that a reload can revert to it; the store holds one for each use.
package policyset
