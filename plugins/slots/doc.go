// Package slots holds what the first-party eviction policies share.
//
// The one idea: a policy's whole state is a few arrays indexed by slot. [Table] keeps what the host said about each
// slot and threads circular lists through them; a policy moves entries between its lists and otherwise owns no memory.
// Ghosts (remembered fingerprints of entries that are gone) are further nodes of the same table, so a ghost list, or a
// stack that mixes residents with ghosts, is a list like any other. [Naming] does the bookkeeping of one question for
// victims. [Heap] orders slots by priority.
//
// Everything is allocated when a policy is made and nothing afterwards. Sizes are in units of 4 KiB, as in events, and
// where a paper counts pages the policies count units.
package slots
