// Package shared lets several hosts use one directory, with no server between them: the file system is all they share.
//
// A host fences another by renaming that host's directory. Everything that a fenced host must not do goes through a
// name in its own directory, so a host that was paused, cut off or slow gets ENOENT when it resumes. A directory is of
// one incarnation, and what a host was allowed to do in it goes with it. No two clocks are compared, no file's time is
// looked at, and safety does not depend on any interval; intervals decide only how soon a silent host is given up.
//
// # Files, below the root's .kvhost/shared
//
//	hosts/<member>/          one per host that takes part; <member> is <host id>.<incarnation>
//	    status               heartbeat, acknowledgements and vetoes, returned credit; replaced at each step
//	    log.<n>              pieces published, entries touched or found damaged; appended to, rotated
//	    t/                   its temporaries
//	gone/<member>/           the directory of a member that left or was given up; the member can no longer write there
//	e<epoch>/                the evictor of that epoch; the highest epoch counts
//	    beat                 heartbeat
//	    grants/<member>      total credit granted; the existence of the file admits the member
//	    journal/j<n>, d<n>   proposed victims; the decision
//	    trash/               victims being removed
//	x<epoch>.<member>/       an evictor that was given up, until its successor has taken over
//	c.<member>/              an epoch directory that a candidate is preparing
//
// # Members
//
// A host joins by creating its directory and waits to be admitted. Once its grant file exists, no victim is removed
// without its acknowledgement; only then does it read the journal and scan the root. The evictor expels a member
// with a status that has not changed for Lapse by the evictor's own clock: it renames the member's directory, replaces its last
// log file by a copy, empties and removes its temporaries, reads its log to the end, and frees its unspent credit.
//
// A member without a directory first forgets everything that rested on it: credit, entries, leases, proposals, what
// it had yet to log. Then it joins again as a new incarnation, and scans. Credit and temporaries are of the incarnation
// that took them: a put that outlives it can neither make a file in the new directory nor publish. What such puts may
// still have in files without a name the new incarnation reports (held), and no host is granted those bytes.
//
// # One evictor
//
// When there is no evictor, or its heartbeat has not changed for Lapse, a member renames the evictor's directory away
// and then renames its own prepared directory to the next epoch. A rename onto a non-empty directory fails, so one
// member wins. Everything that an evictor does to others goes through a name in e<epoch>, including the removal of a
// victim, which is first renamed into trash; an evictor that was given up can therefore do nothing. Its successor finds
// the grants, the journal and the trash in x<epoch> and continues from there. It must know every piece before it grants
// credit; a host that has scanned the root and followed all logs since knows them.
//
// # Credits
//
// A host writes only against credit. Every number is a running total: credit granted to a member, credit it returned,
// bytes its log says it published. Outstanding credit is the first less the other two, and a stale number makes it look
// larger, which is safe. The evictor keeps pieces + outstanding <= capacity, so the capacity holds at every instant,
// whichever host dies.
//
// A piece is published by a hard link. The link fails when another host has published the same piece; the put then ends
// as resident and its credit returns. After the link the log is appended to, and only then is the temporary's name
// removed. A temporary with two links was therefore published, whatever happened in between: the evictor that sweeps it
// reads from its header which piece it is, and its other name, accounts for it and tells the others. A temporary with a
// damaged header is emptied, because the others could not learn what to count.
//
// A link that reports an error may have been made. The number of the temporary's names tells; while it cannot be read, the
// temporary keeps its name and its credit, and each step looks again.
//
// # Eviction in two phases
//
// The evictor writes the victims to the journal. Each member stops granting them, vetoes those that it has leased or is
// writing, and acknowledges. When all members have acknowledged, the evictor removes the victims without a veto and
// writes the decision; a spared victim can be granted again. A key in an undecided batch can be neither granted nor
// stored.
//
// A member's log has what it published before others see its acknowledgement, so its record of a victim cannot follow
// the decision; and the temporaries' names are gone by then, so a victim has no other name. The log of a host that is gone
// can grow no more before anything is decided without it. So a member first lists the decisions, then reads all logs, and
// then applies the decisions: it learns nothing of a victim after its removal. When it cannot read a log it applies none.
// A record of a piece, and a victim, has the names of its files, where they are not the built-in ones. Two hosts may publish
// a piece at the same time under two names: then every member learns of both, and the victim has both.
//
// An entry is in one undecided batch only. Pieces of it that whoever named the victim did not know of stay: each member
// looks for them again. What a sweep finds among the temporaries of a host that is gone is in its log before any decision
// that follows, too.
//
// # What a paused host can do at worst
//
// It may be paused before or after any operation, for any time. Its operations on names fail. A link that was made in
// time is found by who sweeps the temporary. What it appends to its log goes to a file without a name. Before each write
// to a temporary [Member.Holds] is asked, so at most the one write that was under way succeeds, to a file that was emptied
// and has no name; the put fails at its next step, and closes it. It may answer a lookup from its index before it notices.
// [Member.Fresh] is checked first and is false when the last heartbeat is older than half of Lapse, so this needs a pause
// between two instructions, or a clock that stood still too; the loads that follow fail, and the next step forgets.
//
// An evictor that was paused renames to and from names in e<epoch> only, which is gone. It may still expel a member
// that is alive, which then joins again.
//
// The clock is the monotonic one of each host (CLOCK_MONOTONIC): steps of the time of day change nothing. It stands
// still while a virtual machine is paused or a machine sleeps. Such a host finds itself given up at its first step.
//
// # What the file system must do
//
// Rename is atomic, also for directories. Link fails when the name exists. A closed file is seen whole by a later open.
// Other hosts see a created or removed name within a time that is short against Lapse (NFS: mount with actimeo well
// below it, or lookupcache=none). No file lock is used, because its scope is unknown on a network file system.
package shared
