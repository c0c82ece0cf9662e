// Package shared lets several hosts use one directory. No server coordinates them; they communicate through the file system
// alone.
//
// A host fences another by renaming that host's directory. Every operation that a fenced host must not do uses a name in its
// own directory, so a host that was paused, partitioned or slow gets ENOENT when it resumes. Each incarnation of a host has its
// own directory, and the permissions of the incarnation end with it. Clocks are never compared, modification times are not
// used, and safety does not depend on any interval. Intervals only determine how soon a silent host is declared dead.
//
// # Files, below the root's .kvhost/shared
//
//	hosts/<member>/          one for each member, named <host id>.<incarnation>
//	    status               heartbeat, acknowledgements and vetoes, returned credit; replaced at each step
//	    log.<n>              pieces published, entries touched or found damaged; appended to, rotated
//	    t/                   its temporaries
//	gone/<member>/           the directory of a member that left or was expelled; the member can no longer write there
//	e<epoch>/                the evictor of that epoch; the highest epoch counts
//	    beat                 heartbeat
//	    grants/<member>      total credit granted; the existence of the file admits the member
//	    journal/j<n>, d<n>   proposed victims; the decision
//	    trash/               victims being removed
//	x<epoch>.<member>/       an evictor that was deposed, until its successor has taken over
//	c.<member>/              an epoch directory that a candidate is preparing
//
// # Members
//
// A host joins by creating its directory and waits to be admitted. Once its grant file exists, no victim is removed without its
// acknowledgement. Only then does the host read the journal and scan the root. The evictor expels a member if the member's
// status has not changed for Lapse by the evictor's own clock: it renames the member's directory, replaces the last log file by
// a copy, empties and removes the temporaries, reads the log to its end, and frees the unspent credit.
//
// A member that finds its directory missing first discards all state that depends on its membership: credit, entries, leases,
// proposals, and records that it has not logged. Then it joins again as a new incarnation, and scans. Credit and temporaries
// belong to the incarnation that took them: a put that outlives its incarnation can neither create a file in the new directory
// nor publish. The new incarnation reports the bytes that such puts may still hold in unlinked files (held), and these bytes
// are granted to no host.
//
// # Evictor
//
// If there is no evictor, or its heartbeat has not changed for Lapse, a member renames the evictor's directory away and then
// renames its own prepared directory to the next epoch. A rename onto a non-empty directory fails, so one member wins. Every
// operation of an evictor on others uses a name in e<epoch>, including the removal of a victim, which is first renamed into
// trash. So an evictor that was deposed can do nothing. Its successor finds the grants, the journal and the trash in x<epoch>
// and continues from there. An evictor must know every piece before it grants credit. A host knows them once it has scanned the
// root and has followed all logs since.
//
// # Credits
//
// A host writes only against credit. Every number is a running total: the credit granted to a member, the credit that it
// returned, and the bytes that it published according to its log. Outstanding credit is the first less the other two. A stale
// number makes it look larger, which is safe. The evictor keeps pieces + outstanding <= capacity, so the capacity holds at
// every instant, whichever host dies.
//
// A piece is published by a hard link. The link fails if another host has published the same piece. The put then ends as if the
// entry had been resident, and its credit returns. After the link the log is appended to, and only then is the name of the
// temporary removed. So a temporary with two links was published. The evictor that sweeps it reads from its header which piece
// it is and where its other name is, counts it, and logs it for the other hosts. A temporary with a damaged header is emptied,
// because the others could not learn its size.
//
// A link call that returns an error may have succeeded. The link count of the temporary tells. While it cannot be read, the
// temporary keeps its name and its credit, and each step checks again.
//
// # Eviction in two phases
//
// The evictor writes the victims to the journal. Each member stops leasing them, vetoes those that it has leased or is writing,
// and acknowledges. Once all members have acknowledged, the evictor removes the victims without a veto and writes the decision.
// A spared victim can be leased again. An entry in an undecided batch can be neither leased nor stored.
//
// A member logs what it published before others see its acknowledgement, so its record of a victim cannot follow the decision.
// The names of its temporaries are gone by then, so a victim has no other name. The log of a dead host is closed before any
// decision is made without that host. So a member first lists the decisions, then reads all logs, and then applies the
// decisions: it never learns of a victim after its removal. If it cannot read a log it applies no decision. A record of a
// piece, and a victim, contains the names of its files where they are not the built-in ones. If two hosts publish a piece at
// the same time under two names, every member learns of both, and the victim has both.
//
// An entry is in one undecided batch only. Pieces of the entry that the evictor did not know when it proposed the victim are
// kept: each member looks for them again. The pieces that a sweep finds among the temporaries of a dead host are also logged
// before any later decision.
//
// # Worst case after a pause
//
// A host may be paused before or after any operation, for any time. After it was expelled, its operations on names fail. A link
// that it made in time is found by the evictor that sweeps the temporary. Records that it appends to its log go to an unlinked
// file. [Member.Holds] is called before each write to a temporary. So at most the one write that was under way succeeds, to a
// file that was emptied and unlinked; the put fails at its next step, and closes the file. The host may answer a lookup from
// its index before it notices. [Member.Fresh] is checked first and returns false if the last heartbeat is older than half of
// Lapse. So this needs a pause between two instructions, or a clock that stopped too. The loads that follow fail, and the next
// step discards the index.
//
// A paused evictor only renames to and from names in e<epoch>, which is gone. It may still expel a live member, which then
// joins again.
//
// The clock is each host's monotonic one (CLOCK_MONOTONIC), so changes of the wall clock have no effect. It stops while a
// virtual machine is paused or a machine sleeps. Such a host finds at its first step that it was expelled.
//
// # Requirements on the file system
//
// Rename is atomic, also for directories. Link fails if the name exists. A file that was closed is read completely by a later
// open. Other hosts see a created or removed name within a time that is short against Lapse (NFS: mount with actimeo well below
// it, or lookupcache=none). No file lock is used, because its scope is unknown on a network file system.
package shared
