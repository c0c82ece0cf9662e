// Package s3fs is a [staging.FS] of the objects below a prefix of a bucket. One host writes there, or several hosts that coordinate their
// writes ([FS.WriteWhile]) by a protocol of small objects ([Control]).
//
// A new file is kept in memory. If it is longer than one part, it is kept in the parts of a multipart upload. Other hosts do not see it
// before it is renamed, which creates an object with the new name. The first part is sent last, because heads are written last. An existing
// object is renamed by a copy. Directories are prefixes of keys and exist without being created.
//
// A file that is open for reading is one version of an object, which its first request determines. If another version replaces it, reads
// return ESTALE.
//
// A read that takes longer than about 95 % of all reads is requested a second time, and the first answer counts. At most one read in twenty
// is repeated.
//
// Failures are normal. Requests have time limits and are repeated within a budget, with growing and random pauses. If a request fails in
// the end, its errno says whether the server, the permissions or the name is the cause.
//
// The lock of a file is a lease: an object that its holder rewrites periodically. See [FS.Lock].
package s3fs
