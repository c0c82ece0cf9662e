// Package store keeps chunks on disk: piece files under roots, and an index that says which are there.
//
// The index is the truth about what may be served and how many bytes are taken; a file is the truth about its own
// bytes. Space is reserved in the index before a byte is written, and is free only after the file is unlinked, so a
// root's capacity is a promise and not a goal. A file proves by its header and checksums that it is what the index
// says; where it cannot, the entry goes at once and the next lookup misses. So a cache may forget, and never lies.
//
// The packages below this one own a root's parts: entries (the index and the life of each entry) and files (its
// directory), each with its data and its lock. A root puts them together, with a recovery (scans and checkpoints). It is
// plain code between two axes: a [Medium], where the bytes lie, and an owner, this host alone or this host as one of several.
// Failing roots, the order of locks and the goroutines are in host/docs/design.md.
//
// # Life of an entry
//
// [Store.Put] reserves a whole entry (the bytes of all its ranks) at its first piece, asking the evict policy for
// victims where they do not fit. Each piece is written to a named temporary next to its target and published without
// replacing ([Put.Publish]). The entry is resident for a lookup when the pieces that the lookup needs are there:
// engines of one namespace with different local ranks add to one entry, each reserving what the entry has no bytes for.
// [Store.Lookup] grants a [Lease]: a pin on each entry it found. A pinned entry, or one with a write in flight, is
// never a victim. An entry leaves in three steps: the policy hears REMOVE and lookups miss; its files are unlinked,
// outside the lock; its bytes are free.
//
// # Order of a publication
//
//  1. The texts of the namespace and of its plans are durable in every root that takes stores: written, synced,
//     renamed, and their directory synced. A root that takes none catches up before it does again.
//  2. The payload is written to a named temporary next to the target; header and table are written last, or in the same
//     call.
//  3. Strict: the temporary is synced. When that fails the piece is dropped, and not tried again: the kernel may have
//     thrown the bytes away and would report success.
//  4. The temporary is closed. An error that only comes then, as on network file systems, fails the put.
//  5. It is renamed to its target without replacing. An error is not believed before the name was looked at.
//  6. Strict: the directory is synced, and those above it that this process has not synced before.
//  7. The index has it; lookups hit.
//
// What a scan finds, a killed process's, is made durable before it counts where strict is set. Without it a file can be
// missing after a power failure, or be there with any mixture of its bytes and others: size, header and checksums tell. The
// file of an entry that left may be there.
//
// # Levels
//
// Roots have levels. Entries are stored in the nearest one, and lookups grant the nearest whole copy. What a root
// evicts is copied to the next level before it goes, and what is granted from afar can come nearer; package moves does
// that. Each copy is an entry of its own root, with its own bytes and its own place in that root's evict policy.
package store
