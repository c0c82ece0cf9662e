// Package index holds the entries of one root in memory: by slot, by key and by parent, with their last touch, their
// pins and the pieces that are there.
//
// It knows names of files, and nothing of files, of policies or of the account of bytes, and it has no lock: its owner
// guards it. An entry takes 38 bytes, or 54 with keys of more than 16 bytes, and 8.6 to 9.6 bytes more in the two hash
// tables. Where entries expire, each slot takes 4 more.
package index
