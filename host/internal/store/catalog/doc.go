// Package catalog has the namespaces of a store, their groups, and the policies that each namespace is bound to. It has a
// namespace's place policy name new pieces, and computes built-in names.
//
// An index entry names a [Class] in two bytes: a group of a namespace under one layout plan. When the layout policy is
// swapped, new pieces get a new class, and the old class lasts as long as it has entries. All classes of a group share
// fingerprints and have the same base, so a lookup finds the entries of all of them.
//
// The catalog's lock is taken after a store's latches and before none of a root's: no method is called with a root's
// lock held, except those that only read (Class, Base, Tenant, Fingerprint), Class.Ref and Class.Release.
package catalog
