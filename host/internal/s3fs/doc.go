// Package s3fs is a [staging.FS] of the objects below a prefix of a bucket, for one host that writes there, or several that agree by
// small objects of their protocol ([Control]) when each may ([FS.WriteWhile]).
//
// A file that is made is in memory, and in parts of a multipart upload once it is longer than one; others do not see it before
// it is renamed, which puts the object under its new name. Its first part goes last, because heads are written last. An object is
// renamed by a copy. Directories are prefixes of keys: they are there without being made.
//
// A file that is read is one version of an object, which its first request finds. Another version that takes its place ends
// it with ESTALE.
//
// A read that is not answered in about the time of 95 in 100 is asked for again, for one in twenty at most, and the first answer counts.
//
// Failing is normal. Requests have time limits and are tried again, at growing and random pauses, within a budget. What then
// still fails has an errno that says whether the server, the rights or the name is to blame.
//
// The lock of a file is a lease: an object that its holder writes again and again. See [FS.Lock].
package s3fs
