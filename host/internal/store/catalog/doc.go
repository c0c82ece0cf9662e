// Package catalog manages the namespaces of a store, their groups, and the policies that are bound to each namespace. It asks
// the place policy of a namespace for names of new pieces, and computes built-in names.
//
// An index entry refers by two bytes to a [Class]: a group of a namespace under one layout plan. When the layout policy
// changes, new pieces get a new class. The old class exists as long as it has entries. All classes of a group have the same
// fingerprints and the same base, so a lookup finds the entries of all of them.
//
// The catalog's lock is taken after the latches of a store, and never while the lock of a root is held. The methods that only
// read (Class, Base, Tenant, Fingerprint), Class.Ref and Class.Release may be called with a root's lock held.
package catalog
