// Package files manages the directory of one root: the files of pieces, the durability of names, and the files that are no
// longer served.
//
// An unwanted file is removed at once. If that fails, the file is an orphan: [Orphans] lists it and tries again, and its bytes
// stay in the account until it is gone. The newest damaged files are kept in the [Quarantine] for the operator to examine.
//
// # Locks
//
// Orphans and Quarantine each have a lock. No file is accessed and no policy is called while it is held. The lock of the
// quarantine may be taken while the root's is held, and the account's lock may be taken while the quarantine's is held.
// Directories are created and removed under a lock of their own, during which files are accessed.
package files
