// Package chunk holds the nouns of kvhost: keys, namespaces, groups, geometry, layout plans and checksums.
//
// The one idea: a piece's payload is a pure function of page bytes and a [Plan]. A [Namespace] says which bytes may ever
// be exchanged for which others; a [Geometry] says how many pages of what size make a chunk; a Plan says in which order
// they stand in the file, and an [ExtentTable] proves that each run of them is what was written.
//
// Nothing here does I/O. Everything here is comparable, immutable once made, or append-only.
package chunk
