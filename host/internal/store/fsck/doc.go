// Package fsck verifies a root: every piece file and the files that the store keeps for itself.
//
// A root is judged by its files alone, so that it can be checked while a host serves from it. A check only reads. A
// repair does three things, each of which a running host survives without knowing of it:
//
//   - A file that is not what it should be is renamed into quarantine. Published files are never written to, and a host
//     that finds one gone takes it for a miss and drops the entry. A host may however take a victim's file over for
//     another piece, and then it changes under the check. So a file counts as damaged only when it was found so twice,
//     both times the same file, unchanged; it is compared once more before the rename. What turns out to be another file
//     after it stays in quarantine, where its host counts it.
//     Hosts that share a root count no quarantine, so there the file is removed.
//     The host does not unlink what a check reads, which it locks: the bytes would be taken and in no account.
//   - A temporary is removed only with the locks held that its owner would hold if it lived, so that no host can be
//     writing it or start to. Where hosts share a root, and a lock may not reach across machines, it must be old, too:
//     old by the file system's clock, not by this machine's.
//   - What the store keeps for itself and writes again by itself is put into quarantine when it is damaged. What
//     hosts that share the root leave for each other is only looked at.
//
// A bucket is repaired under its lock, and refused while a host has it: an object is renamed by a copy and a removal.
//
// What a check cannot judge it leaves alone: files that are no pieces, unless they have a built-in name or an empty first
// page, and formats of a later version.
package fsck
