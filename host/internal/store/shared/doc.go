// Package shared lets several hosts use one root. No server coordinates them; they communicate through what holds the root, a
// file system or a bucket. One host, the evictor, manages the capacity by granting credit, and removes entries that no host
// uses.
//
// Clocks are never compared, and modification times are not used. Intervals only determine how soon a silent host is declared
// dead. Each incarnation of a host is a member of its own, and its permissions end with it.
//
// # One protocol, two media
//
// [Member] and its term as the evictor are the same for both media. The unexported interface medium is what a directory and a
// bucket do in their own ways:
//
//	                     directory                              bucket
//	fence a member       rename of its directory                condition on the version of its object
//	fence an evictor     rename of its directory                condition on the version of the evictor's object
//	evictor's record     directory of files, written at once    one object, written at the end of a step
//	log                  appended to, rotated                   objects, each written once
//	dead log ends        its last file is replaced by a copy    where it ends is written into the evictor's object
//	unlogged pieces      are temporaries with a second name     are found by a list of the bucket (audit)
//	publication          hard link                              write on condition that no object has the name
//	removal of a victim  fails once the evictor is fenced       may still take effect
//	capacity             holds at every instant                 is exceeded by puts of a paused host until an audit
//
// A member joins, is admitted by its first grant, and is active once it has scanned the root. To the evictor it is then granted,
// gone (expelled, silent or left), sealed (its log cannot grow any more), swept (all that it stored is counted), and forgotten
// (all others have read its log). A batch of victims is proposed, written, acknowledged by each member that is not sealed,
// judged (its victims are removed except the spared ones), decided (the others can read that), applied by each member, and
// dropped. Batches are judged in order.
//
// # Steps
//
// A member makes one step in each poll. It reads the evictor's record, then lists the members, then reads their logs. Only then
// does it act on the evictor's record: it applies decisions and acknowledges batches. At the end of the step it writes its own
// log, and then its status. A step that cannot read still writes the status, but only for half of Lapse: a host that cannot
// acknowledge must not be waited for.
//
// # Members
//
// A host joins under a new name and waits to be admitted. Once it has a grant, no victim is removed without its acknowledgement.
// Only then does it note where the other logs end, and scan the root. The evictor expels a member if the member's status has not
// changed for Lapse by the evictor's own clock, closes its log, and frees the unspent credit once everything that the member
// stored is counted.
//
// A member that finds that it was expelled first discards all state that depends on its membership: credit, entries, leases,
// proposals, and records that it has not logged. Then it joins again as a new incarnation, and scans. Credit and temporaries
// belong to the incarnation that took them: a put that outlives its incarnation cannot publish. The new incarnation reports the
// bytes that such puts may still hold (held), and these bytes are granted to no host.
//
// # Credits
//
// A host writes only against credit. Every number is a running total: the credit granted to a member, the credit that it
// returned, and the bytes that it published according to its log. Outstanding credit is the first less the other two. A stale
// number makes it look larger, which is safe. The evictor keeps pieces + outstanding <= capacity. It must know every piece before
// it grants credit. A host knows them once it has scanned the root and has followed all logs since.
//
// A piece is published only where no other has its name. If another host was first, the put ends as if the entry had been
// resident, and its credit returns. If a put gets no answer it is in doubt, and each step looks again; the credit stays reserved
// until the outcome is known.
//
// # Eviction in two phases
//
// The evictor writes the victims into a batch. Each member stops leasing them, vetoes those that it has leased or is writing,
// and acknowledges. Once all members have acknowledged, the evictor removes the victims without a veto and writes the decision.
// A spared victim can be leased again. An entry in an undecided batch can be neither leased nor stored, and is in one such batch
// only.
//
// A member logs what it published before others see its acknowledgement, so its record of a victim cannot follow the decision.
// The log of a dead host is closed before any decision is made without that host, and the pieces that the evictor finds of such
// a host are logged before the next decision. So a member first lists the decisions, then
// reads all logs, and then applies the decisions: it never learns of a victim after its removal. If it cannot read a log it
// applies no decision. A record of a piece, and a victim, contains the names of its files where they are not the built-in ones.
// If two hosts publish a piece at the same time under two names, every member learns of both, and the victim has both. Pieces of
// an entry that the evictor did not know when it proposed the victim are kept: each member looks for them again.
//
// A decision that cannot be read, and a batch that some member cannot read for several lapses, count as spared: every member then
// looks for the files.
//
// # In a directory
//
// The files are below the root's .kvhost/shared:
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
// Every operation that a fenced host must not do uses a name in its own directory, so a host that was paused, partitioned or
// slow gets ENOENT when it resumes. Safety does not depend on any interval.
//
// If there is no evictor, or its heartbeat has not changed for Lapse, a member renames the evictor's directory away and then
// renames its own prepared directory to the next epoch. A rename onto a non-empty directory fails, so one member wins. Every
// operation of an evictor on others uses a name in e<epoch>, including the removal of a victim, which is first renamed into
// trash. So an evictor that was deposed can do nothing. Its successor copies the grants and the journal from x<epoch> and
// empties its trash.
//
// A piece is published by a hard link. After the link the log is appended to, and only then is the name of the temporary
// removed. So a temporary with two links was published, and a victim has no name among the temporaries. The evictor that sweeps
// the temporaries of a dead host reads from the header which piece it is and where its other name is, counts it, and logs it for
// the other hosts. A temporary with a damaged header is emptied, because the others could not learn
// its size. A link call that returns an error may have succeeded; the link count of the temporary tells.
//
// At worst a host is paused before or after any operation, for any time. After it was expelled, its operations on names fail. A
// link that it made in time is found by the evictor that sweeps the temporary. Records that it appends to its log go to an
// unlinked file. [Member.Holds] is called before each write to a temporary. So at most the one write that was under way
// succeeds, to a file that was emptied and unlinked; the put fails at its next step, and closes the file. The host may answer a
// lookup from its index before it notices. [Member.Fresh] is checked first and returns false if the last heartbeat is older than
// half of Lapse. So this needs a pause between two instructions, or a clock that stopped too. The loads that follow fail, and
// the next step discards the index. A paused evictor only renames to and from names in e<epoch>, which is gone. It may still
// expel a live member, which then joins again.
//
// The clock is each host's monotonic one (CLOCK_MONOTONIC), so changes of the wall clock have no effect. It stops while a
// virtual machine is paused or a machine sleeps. Such a host finds at its first step that it was expelled.
//
// The file system must do the following. Rename is atomic, also for directories. Link fails if the name exists. A file that was
// closed is read completely by a later open. Other hosts see a created or removed name within a time that is short against Lapse
// (NFS: mount with actimeo well below it, or lookupcache=none). No file lock is used, because its scope is unknown on a network
// file system.
//
// # In a bucket
//
// A bucket offers neither rename nor link. It must offer conditional writes, which name the version that they replace or require
// that the object does not exist, and reads and lists that return everything written before they began. The objects are below
// the root's .kvhost/shared:
//
//	evictor            term, owner and heartbeat counter; a grant for each member: the credit granted to it and, once it is gone, how
//	                   much of that is known to be spent and where its log ends; the batches of victims and the decisions
//	hosts/<member>     heartbeat counter, length of its log, acknowledgements and vetoes, the state of its credit
//	log/<member>/<n>   the entries that it published, touched or found damaged since n-1; written once
//	batch/<n>          victims; written once
//
// Each object has one writer at a time. The writer replaces the version that it wrote last. An idle step takes two requests, and
// the status is written four times in each Lapse.
//
// The evictor expels a member by writing where its log ends, and then removes the member's object. The member's next heartbeat
// then fails, and so the member learns that it is fenced. No host reads what it logged after the recorded end; an audit finds the
// objects that it stored. A host that leaves writes an end mark as its last log object. The mark means that everything it
// published is logged.
//
// A member that has not seen the evictor's object change for Lapse, or that finds that its owner left, writes itself into the
// object with the next term, replacing the version that it read. If several members try, one succeeds. The new evictor continues
// with the grants and batches that are in the object. The writes of the replaced evictor fail, and with them all its decisions;
// only its removals may still take effect.
//
// A put whose answer is missing may still take effect later; its credit stays reserved for that long (landing). The credit of a
// dead member stays reserved until an audit, which lists the whole bucket in the background. The audit begins once all requests
// of the dead member must have taken effect. Objects that it finds and that no log mentions are read, counted, and logged for
// the other hosts. An audit also runs once in each auditEvery. A host that left cleanly needs none.
//
// At worst a host pauses. Its monotonic clock tells it when the others may have declared it dead: Fresh is called before each
// attempt of a request that stores, and before each lookup. What remains are the requests that were under way when the host
// paused, or that began between the call of Fresh and the pause; each put or removal of the host has at most one:
//
//   - A put may store its piece at any later time. The piece is not counted until the next audit, so the capacity is exceeded by at most the bytes of the host's unfinished puts. No host reads the piece before that, and its content is what its name says.
//   - An evictor may declare a live member dead, which then joins again.
//   - An evictor's removal may remove an object that was stored again since. Loads of the entry then fail, and count as misses.
//   - A lookup may succeed for an entry that is gone. Its load then fails.
//
// None of these returns a wrong byte: names are derived from the content, and each read is verified.
package shared
