// Package pieceformat encodes and decodes the files that a store keeps in a root: piece headers and checksum tables,
// the checkpoint of the index, the list of touches, the state of an evict policy, and the names of all files. It turns
// bytes into structs and back, and knows nothing of an index, of policies or of where the files are.
package pieceformat
