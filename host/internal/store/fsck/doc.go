// Package fsck verifies a root: every piece file and the metadata files of the store.
//
// A check relies on the files alone, so it can run while a host serves from the root. Without a repair it only reads. A repair
// does three things, none of which requires the cooperation of a running host:
//
//   - A bad file is renamed into quarantine. Published files are never written to, and a host that finds one missing counts a miss and drops the entry. However, a host may reuse the file of a victim for another piece, so that it changes during the check. So a file counts as damaged only if two reads in a row found it damaged and unchanged. It is compared once more before the rename. If the renamed file nevertheless turns out to be another one, it stays in quarantine, where its host counts it. Hosts that share a root do not count the quarantine, so there the file is removed. The check locks a file while it reads it, and the host does not unlink a locked file, because the bytes would still be allocated but not counted.
//   - A temporary is removed only while the locks are held that its owner would hold if it were running. So no host can be writing the temporary or start to. If hosts share the root, a lock may not be visible across machines. So the temporary must also be old, by the clock of the file system rather than that of this machine.
//   - A damaged metadata file that the store writes again by itself is moved to quarantine. The files of the protocol of hosts that share the root are only read.
//
// A bucket is repaired while its lock is held, since an object is renamed by a copy and a removal. The repair is refused while
// a host uses the bucket.
//
// Files that cannot be judged are left alone: files that are no pieces, unless they have a built-in name or an empty first
// page, and files of a later format version.
package fsck
