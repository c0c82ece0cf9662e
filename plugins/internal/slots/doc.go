// Package slots is the common base of the first-party eviction policies.
//
// The whole state of a policy is a few arrays indexed by slot. A [Table] records the host's facts about each slot, and
// links slots in circular lists. A policy moves entries between its lists and owns no other memory. Ghosts are
// fingerprints of removed entries. They are further nodes of the same table, so a list of ghosts, or of residents and
// ghosts, is a list like any other. [Naming] is the state of one answer with victims.
//
// Memory is allocated a page at a time for the slots and ghosts that are used, and is kept ([Array]). Sizes are in
// units of 4 KiB, as in events. Where a paper counts pages, the policies count units.
package slots
