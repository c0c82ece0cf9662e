// Package kv holds the nouns of kvhost: keys, namespaces, groups, geometry, layout plans and checksums.
//
// A piece's payload is a pure function of page bytes and a [Plan]. A [Namespace] identifies bytes that may replace one
// another; a [Geometry] gives the number and size of the pages of a chunk; a Plan gives their order in the file; an
// [ExtentTable] holds the checksum of each run of them.
//
// The package does no I/O. Its values are comparable, immutable once made, or append-only.
package kv
