// Package capacity accounts for the bytes of one root.
//
// An [Account] holds what entries, the quarantine, orphans and files that a scan has not seen take together, and how
// much the root may take. Bytes are reserved before a file is written and released after it is unlinked, so a root
// stays within its capacity at every moment. A [Budget] counts the bytes written in a day. A [Quota] bounds the entries
// of a tenant.
//
// The package opens no file and knows no entry. Build with the tag invariants to check the account after each change.
package capacity
