// Package pieceformat encodes and decodes the files that a store keeps in a root: piece headers and checksum tables,
// the checkpoint of the index, the state of an evict policy, and the names of all files. It turns
// bytes into structs and back, and knows nothing of an index or of where the files are.
//
// A piece has the built-in name ([AppendBuiltin]), which follows from what the piece is, or one that a place policy gave
// it when its put was reserved. Such a name is a fact of the piece: it is in the index of its root, in the root's
// checkpoint, in the header page of the piece's file and, on a shared root, in the records that the hosts exchange.
package pieceformat
