// Package shared lets several hosts use one directory, with no server between them: the file system is all they share.
//
// The one idea: whatever must not be done by a host that others have given up is done through a name in a directory of
// its own, and giving a host up begins with renaming that directory. A host that was asleep, cut off or slow then meets
// ENOENT, whatever it believed when it fell asleep. So nothing here compares two clocks, and no interval has to be long
// enough for safety; intervals only say how soon a host is given up.
//
// # Files, below the root's .kvhost/shared
//
//	hosts/<member>/          one per host that takes part; <member> is <host id>.<incarnation>
//	    status               heartbeat, acknowledgements and vetoes, credit given back; replaced at each step
//	    log.<n>              what it has published, touched and found damaged; appended to, rotated
//	    t/                   its temporaries
//	gone/<member>/           the same, of a member that left or was given up: it cannot write there any more
//	e<epoch>/                of the evictor of that epoch; the highest one counts
//	    beat                 heartbeat
//	    grants/<member>      credit handed out, in all; its being there admits the member
//	    journal/j<n>, d<n>   victims proposed; what was decided
//	    trash/               victims on their way out
//	x<epoch>.<member>/       of an evictor that was given up, until its successor has taken everything over
//	c.<member>/              a candidate's epoch in the making
//
// # Members
//
// A host joins by making its directory, and shouldWait to be admitted: from the moment that its file of grants is there, no
// victim is removed without its acknowledgement. Only then it looks at the journal and scans the root. A member whose
// status has not changed for Lapse, as the evictor's own clock has it, is given up: its directory is renamed, its
// temporaries are removed, its log is read to the end, its unspent credit is free again. A member that finds its
// directory gone begins anew with another incarnation: its writes have failed, what it had leased may be gone (a load
// then meets ENOENT and fails its blocks), and it scans again.
//
// # One evictor
//
// Without an evictor, or when its beat has not changed for Lapse, a member renames the evictor's directory away, and then
// its own prepared directory to the next epoch: a rename onto a directory that is not empty fails, so one wins. Everything
// that an evictor does to others goes through a name in e<epoch>, also the removal of a victim, which is renamed into
// trash first; so an evictor that was given up can do nothing. Its successor finds the grants, the journal and the trash in
// x<epoch>, and goes on. It must know every piece before it hands out credit: a host that has scanned the root and has
// followed all logs since does.
//
// # Credits
//
// A host writes only against credit. Every number is a sum that only grows: what was granted to a member, what it gave
// back, what its log says it published. What is outstanding is the first less the others, and a number that is read late
// makes it look larger, which is safe. The evictor keeps pieces + outstanding <= capacity, so that the capacity holds at
// every instant, whoever dies.
//
// A piece is published by a second name: link fails when the name is taken (another host was first: the put ends as
// resident, its credit is there again), the log is appended to, and only then the temporary's name goes. So whatever
// happens between, a temporary with two names says that its piece was published, and the evictor that sweeps it accounts
// for it and tells the others.
//
// # Eviction in two phases
//
// The evictor writes the victims to the journal. Each member stops granting them, or vetoes those that it has leased or is
// writing, and acknowledges. When all have, the victims without a veto are removed and the decision is written; a victim
// that was spared can be granted again. A key in an undecided batch can be neither granted nor stored.
//
// # What a paused host can do at worst
//
// Its operations on names fail. Its writes to a temporary that is open already succeed, to a file without a name, and
// take space until it closes it. It may answer a lookup from its index before it has noticed; [Member.Fresh] is asked
// first, and is false when the last heartbeat is older than half of Lapse, so this takes a pause between two
// instructions, and ends in loads that fail.
//
// # What the file system must do
//
// Rename is atomic, for directories too; link fails when the name is there; a file that was closed is seen whole by who
// opens it afterwards; a name that was made or removed is seen by others within a time that is short against Lapse (NFS:
// mount with actimeo well below it, or lookupcache=none). All hosts use the same place policy. No lock is needed: a lock
// whose reach nobody knows is worse than none.
package shared
