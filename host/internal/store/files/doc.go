// Package files is one root's directory: where a piece's file is, which names are durable, and what becomes of files
// that are not served.
//
// A file that is not wanted is removed at once. One that cannot be is an orphan: [Orphans] lists it and tries again,
// and its bytes stay in the account until it is gone. A damaged file is kept in the [Quarantine] for the operator to look
// at, the newest few of them.
//
// # Locks
//
// Orphans and Quarantine have a lock each, under which no file is touched and no policy is called. That of the
// quarantine may be taken under the root's, and takes the account's. A directory is made under a lock of its own, in which
// files are touched; it goes under the same lock.
package files
