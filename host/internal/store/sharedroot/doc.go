// Package sharedroot is a root's part among the hosts that share it: it connects the entries and files of one root with
// a member of the protocol in package shared, which says why the protocol holds.
//
// A piece is written against credit, and nothing is reserved for the entry's other ranks, which other hosts may write.
// Temporaries are in the member's directory. Nobody takes a name away because its file is damaged or unwanted: a host
// proposes that ([Root.Unlink], [Root.ReportDamaged]), and the evictor removes the file when no host has it leased.
//
// # Lock
//
// What a [Root] counts is guarded by the lock of its entries. No file is touched and no member is asked to write under
// it.
package sharedroot
