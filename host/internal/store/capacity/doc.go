// Package capacity accounts for the bytes of one root.
//
// An [Account] tracks the bytes of entries, of the quarantine, of orphans and of files that a scan has not yet seen, and the
// most that the root may use. Bytes are reserved before a file is written and released after it is unlinked, so a root never
// exceeds its capacity. A [Budget] limits the bytes written in a day. A [Quota] limits the entries of a tenant.
//
// The package does not open the files of a root and knows nothing of entries. Build with the tag invariants to check the
// account after each change.
package capacity
