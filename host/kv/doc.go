// Package kv holds the basic types of kvhost: keys, namespaces, groups, geometry, layout plans and checksums.
//
// A piece's payload is a pure function of page bytes and a [Plan]. A [Namespace] identifies bytes that may replace one
// another. A [Geometry] gives the number and size of the pages of a chunk. A Plan gives their order in the file. An
// [Extent] is a run of payload bytes with a checksum.
//
// The package does no I/O. Its values are comparable, immutable or append-only.
package kv
