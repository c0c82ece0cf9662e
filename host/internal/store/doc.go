// Package store keeps chunks on disk: piece files under roots, and an index of the resident ones.
//
// The index decides what may be served and how many bytes are used. A file is the authority on its own bytes. Space is reserved
// in the index before a byte is written and released only after the file is unlinked, so a root never exceeds its capacity. A
// file proves by its header and checksums that it matches the index. If it does not, the entry is removed at once and the next
// lookup misses. The cache may lose entries, but it never returns wrong bytes.
//
// The packages below this one own the parts of a root: entries (the index and the life of each entry) and files (the
// directory), each with its data and its lock. A root combines them with a recovery (scans and checkpoints). It is plain code
// between two axes: a [Medium], which is the place of the bytes, and an owner, which is this host alone or this host as one of
// several. Failing roots, the order of locks and the goroutines are described in host/docs/design.md.
//
// # Life of an entry
//
// [Store.Put] reserves a whole entry (the bytes of all its ranks) at its first piece. If they do not fit, it asks the evict
// policy for victims. Each piece is written to a named temporary next to its target and published without replacing a file
// ([Put.Publish]). The entry is resident for a lookup when the pieces that the lookup needs are present. Engines of one
// namespace with different local ranks add pieces to the same entry, and each reserves the bytes that are missing.
// [Store.Lookup] grants a [Lease], which pins the entries that were found. An entry that is pinned or being written is never a
// victim. An entry leaves in three steps: the policy receives REMOVE and lookups miss; the files are unlinked, without the
// lock; the bytes are released.
//
// # Order of a publication
//
//  1. The texts of the namespace and of its plans are durable in every root that takes stores: written, synced, renamed, and their directory synced. A root that takes no stores catches up before it takes stores again.
//  2. The payload is written to a named temporary next to the target. Header and table are written last, or in the same call.
//  3. Strict: the temporary is synced. If that fails, the piece is dropped and not tried again, because the kernel may have discarded the bytes and would report success the next time.
//  4. The temporary is closed. If the close returns an error, as it can on network file systems, the put fails.
//  5. The temporary is renamed to its target without replacing a file. After an error the name is examined before the error is believed.
//  6. Strict: the directory is synced, and the directories above it that this process has not synced before.
//  7. The piece is entered in the index, and lookups hit.
//
// With Strict, files of a killed process that a scan finds are made durable before they count. Without Strict, a file can be
// missing after a power failure or contain any mixture of its bytes and others, which size, header and checksums reveal. The
// file of a removed entry may also reappear.
//
// # Levels
//
// Roots have levels. Entries are stored in the nearest level, and lookups grant the nearest complete copy. An entry that a root
// evicts is copied to the next level before it leaves, and a granted entry of a farther level can be copied to a nearer one.
// Package moves makes these copies. Each copy is an entry of its own root, with its own bytes and its own place in that root's
// evict policy.
package store
