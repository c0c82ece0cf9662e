// Package catalog knows whose files a store has: the namespaces and their groups, which policies each namespace is
// bound to, and which place policy named which files. It turns the identity of a piece into a path and back.
//
// An index entry names a [Class] in two bytes: a group of a namespace under one [PlaceGeneration] and one layout plan.
// When either is swapped, new pieces get a new class, and the old class lasts as long as it has entries. A path is
// computed, not stored, so a place policy that was replaced must stay loaded until the last of its files is gone. All
// classes of a group share fingerprints and have the same base, so a lookup finds the entries of all of them.
//
// The catalog's lock is taken after a store's latches and before none of a root's: no method is called with a root's
// lock held, except those that only read (Class, Base, Tenant, Fingerprint), Class.Ref and Class.Release.
package catalog
