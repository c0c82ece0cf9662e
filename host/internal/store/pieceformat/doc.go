// Package pieceformat encodes and decodes the files that a store keeps in a root: piece headers and checksum tables, the
// checkpoint of the index, the state of an evict policy, and the names of all files. It converts between bytes and structs, and
// knows nothing of an index or of the location of files.
//
// A piece has either the built-in name ([AppendBuiltin]), which follows from its identity, or a name that a place policy gave
// it when its put was reserved. A name from a policy is stored with the piece: in the index of its root, in the root's
// checkpoint, in the header page of its file and, on a shared root, in the records that the hosts exchange.
package pieceformat
