// Package policyset holds the policies that a configuration names. It opens them, binds them to roots and namespaces,
// and replaces them while the host runs. [Open] opens them for the store's start. [Set.Swap], [Set.Promote] and
// [Set.Reload] change them afterwards.
//
// A module is open as long as there is a [policy.Handle] to it. The set holds one handle for the module that is active
// under each label, so that a reload can revert to it. The store holds one handle for each use.
package policyset
