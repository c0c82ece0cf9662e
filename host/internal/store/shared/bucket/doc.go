// Package bucket lets several hosts use one prefix of a bucket, with no server between them but the bucket's. It does for
// objects what [shared] does for a directory: one host, the evictor, holds the capacity by credits, and removes what no host
// uses. Names cannot be renamed or linked there; what a server promises is that each write can name the version that it
// replaces, or that there must be none, and that reads and lists show what was written before they began.
//
// # Objects, below the root's .kvhost/shared
//
//	evictor            term, owner and beat; a seat for each member: credit granted, and where the log of one that is gone
//	                   ends; batches of victims, and decisions
//	hosts/<member>     one per host that takes part, <member> is <host id>.<incarnation>: beat, length of its log, acknowledgements
//	                   and vetoes, what it says of its credit
//	log/<member>/<n>   what it published, touched or found damaged since n-1; written once
//	batch/<n>          victims; written once
//
// Each object has one writer at a time, who writes in the place of the version that it wrote last.
//
// # A step, once in a poll
//
// A member reads the evictor's object, then lists hosts, then reads the statuses that have changed and the logs that have grown, and
// only then does what the evictor's object said: applies decisions, acknowledges batches. What a decision removes was logged
// before it was acknowledged, and acknowledged before it was decided: so a member learns nothing of a victim after its removal.
// It writes its own log, and its status after that. Where nothing happens a step is two requests, and the status is written
// four times in Lapse.
//
// # Members
//
// A host joins with an object among hosts, and is admitted by a seat. From then on nothing is removed without its acknowledgement; it
// notes where the logs end, and scans the bucket.
//
// The evictor gives a member up that has no object any more, or one that has not changed for Lapse by the evictor's clock. It writes down
// where the member's log ends, and removes the member's object. The member's next heartbeat fails, by which it learns that it is
// fenced: it forgets all that rested on its membership, joins as a new incarnation, and scans. What it may have logged in between is read by
// no host; an audit finds what it stored. A host that leaves says by the last of its log that all it published is logged.
//
// # One evictor
//
// A member that has not seen the evictor's object change for Lapse, or finds that its owner left, writes itself in with the next term, over the
// version that it has read. Of several one succeeds. It goes on with the same seats and batches, as they are in the object. An evictor that
// was given up fails at its next write, and with it everything that it meant to do, but for removals: see below.
//
// # Credits
//
// As in [shared]: totals of what was granted, returned and published, of which a stale one is safe. A piece is put where there is no object
// of its name; another host's is not replaced, and the put ends as resident. A put without an answer is in doubt: its credit stays with it
// while the object may yet appear (landing).
//
// The credit of a member that is gone stays booked until an audit: a list of the whole bucket, in the background, which begins when what the
// member had under way has landed. What is found that no log told of is read, counted, and told to the others. An audit
// follows in each auditEvery too. A host that left cleanly needs none.
//
// # What a paused host can do at worst
//
// Its clock, which is monotonic, tells it that it may be given up: Fresh is false half of Lapse after its last beat began, and is asked before each
// attempt of a request that stores, and before each lookup. What stays is what was under way when it paused, or began
// between that question and the request, one for each put or removal of that host:
//
//   - a put may store its piece, at any later time. It is in no account until the next audit: the capacity is exceeded by at most what the
//     host's puts had under way. Nobody reads it before that, and what it holds is what its name says.
//   - an evictor may end the part of a member that is alive, which then joins again.
//   - a removal, of an evictor, may remove an object that was stored again since: loads of it fail, and it is a miss.
//   - a lookup may grant what is gone: its load fails.
//
// None of that is a wrong byte: names are of content, and each read is verified.
package bucket
