// Package bucket lets several hosts share one prefix of a bucket. The only server between them is the bucket's. The package
// does for objects what [shared] does for a directory: one host, the evictor, manages the capacity by granting credit, and
// removes entries that no host uses. A bucket offers neither rename nor link. It must offer conditional writes, which name the
// version that they replace or require that the object does not exist, and reads and lists that return everything written
// before they began.
//
// # Objects, below the root's .kvhost/shared
//
//	evictor            term, owner and heartbeat counter; a grant for each member: the credit granted to it and, once it is gone, where
//	                   its log ends; the batches of victims and the decisions
//	hosts/<member>     one for each member, named <host id>.<incarnation>: heartbeat counter, length of its log, acknowledgements and
//	                   vetoes, the state of its credit
//	log/<member>/<n>   the entries that it published, touched or found damaged since n-1; written once
//	batch/<n>          victims; written once
//
// Each object has one writer at a time. The writer replaces the version that it wrote last.
//
// # Steps
//
// A member makes one step in each poll. It reads the evictor's object, then lists hosts, then reads the statuses that have
// changed and the logs that have grown. Only then does it act on the evictor's object: it applies decisions and acknowledges
// batches. Every record of a victim was logged before the batch was acknowledged, and the batch was acknowledged before it was
// decided. So a member never learns of a victim after its removal. At the end of the step the member writes its own log, then
// its status. An idle step takes two requests, and the status is written four times in each Lapse.
//
// # Members
//
// A host joins by writing an object below hosts, and is admitted when the evictor gives it a grant. From then on nothing is
// removed without its acknowledgement. It notes where the other logs end, and scans the bucket.
//
// The evictor declares a member dead if the member's object is missing, or has not changed for Lapse by the evictor's clock. It
// records where the member's log ends, and removes the member's object. The member's next heartbeat then fails, and so the
// member learns that it is fenced: it discards all state that depends on its membership, joins as a new incarnation, and scans.
// No host reads what it logged after the recorded end; an audit finds the objects that it stored. A host that leaves writes an
// end mark as its last log object. The mark means that everything it published is logged.
//
// # Evictor
//
// A member that has not seen the evictor's object change for Lapse, or that finds that its owner left, writes itself into the
// object with the next term, replacing the version that it read. If several members try, one succeeds. The new evictor
// continues with the grants and batches that are in the object. The writes of the replaced evictor fail, and with them all its
// decisions; only its removals may still take effect (see below).
//
// # Credits
//
// As in [shared], members report running totals of the bytes granted, returned and published, and a stale total is safe. A
// piece is only stored where no object has its name. If another host has stored it, that object is kept, and the put ends as if
// the entry had been resident. If a put gets no answer, its outcome is in doubt, and its credit stays reserved while the object
// may still appear (landing).
//
// The credit of a dead member stays reserved until an audit, which lists the whole bucket in the background. The audit begins
// once all requests of the dead member must have taken effect. Objects that it finds and that no log mentions are read,
// counted, and logged for the other hosts. An audit also runs once in each auditEvery. A host that left cleanly needs none.
//
// # Worst case after a pause
//
// A host's monotonic clock tells it when the others may have declared it dead: Fresh returns false from half of Lapse after the
// start of its last heartbeat, and is called before each attempt of a request that stores, and before each lookup. What remains
// are the requests that were under way when the host paused, or that began between the call of Fresh and the pause; each put or
// removal of the host has at most one:
//
//   - A put may store its piece at any later time. The piece is not counted until the next audit, so the capacity is exceeded by at most the bytes of the host's unfinished puts. No host reads the piece before that, and its content is what its name says.
//   - An evictor may declare a live member dead, which then joins again.
//   - An evictor's removal may remove an object that was stored again since. Loads of the entry then fail, and count as misses.
//   - A lookup may succeed for an entry that is gone. Its load then fails.
//
// None of these returns a wrong byte: names are derived from the content, and each read is verified.
package bucket
