// Package s3double is a test double of an object store: a server of the part of S3 that a root in a bucket uses, with its
// objects in memory, and a proxy that injects the faults of networks and servers before this one or a real one. Signatures are
// not checked.
package s3double
