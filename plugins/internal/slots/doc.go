// Package slots holds what the first-party eviction policies share.
//
// A policy's whole state is a few arrays indexed by slot. [Table] keeps what the host said about each slot and threads
// circular lists through the slots; a policy moves entries between its lists and owns no other memory. Ghosts
// (fingerprints of removed entries) are further nodes of the same table, so a ghost list, or a stack of residents and
// ghosts, is a list like any other. [Naming] does the bookkeeping of one question for
// victims.
//
// Memory comes with the slots and ghosts that are used, a page at a time, and stays ([Array]). Sizes are in
// units of 4 KiB, as in events, and where a paper counts pages the policies count units.
package slots
