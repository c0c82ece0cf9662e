// Package index holds the entries of one root in memory. Entries are found by slot, by key and by parent. Each has its last
// touch, its pins and the set of its pieces.
//
// The index stores names of files. It knows nothing of files, policies or the account of bytes. It has no lock: its owner
// guards it. An entry takes 38 bytes, or 54 with keys of more than 16 bytes, and 8.6 to 9.6 bytes more in the two hash tables.
// If entries expire, each slot of a block with such an entry takes 4 bytes more.
package index
