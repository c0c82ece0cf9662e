// Package names is how the pieces of a root are named, below the root.
//
// A piece has the built-in name ([AppendBuiltin]), which follows from what the piece is, or one that a place policy gave
// it when its put was reserved. Such a name is a fact of the piece: it stands in the [Table] of its root, in the root's
// checkpoint, in the header page of the piece's file and, on a shared root, in the records that the hosts exchange.
package names
