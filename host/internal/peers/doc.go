// Package peers lets hosts lend each other what they hold: a prompt's prefix that lies on the node next door is a hit here.
//
// Each host tells the others the fingerprints of its resident entries, all at first and then what changes, so a [Table] in memory says who
// has what. Where a lookup misses, the table is asked, which costs no message. Only if peers promise something are they asked for
// leases of it, all at once and within a deadline, and the lookup made again. What is lent are entries of one more root, behind all others, with a file
// system ([FS]) that reads from the lenders. So verification, layer-wise loads, promotion to nearer levels and the handling of failures are
// those of every root. When a lease has ended, its entries leave the index.
//
// A peer answers only for its own roots, and not for those in buckets, which others reach as soon themselves. Nothing is asked on
// another's behalf, so there are no loops. A namespace is named by its digest, and a private tenant's namespace has a digest no other has.
//
// Hosts keep a chunk once. What is lent is a touch for the lender's policy and is not copied to the last level; what the last level evicts, and
// no other host has, is offered to the peer that takes longest to replace what it holds, which fetches it if it likes.
//
// Where both hosts have NIXL and UCX a way between them, the bytes of loads are read from the lender's memory: the agent's metadata comes with
// the residents, Place says where a piece is, and the rest is a READ of package gds/nixl. Such a READ cannot be stopped. When it is given up, or has
// failed, the error says that its destination is in use ([staging.Held]), the slot waits for its end, and the peer is read by gRPC.
//
// What a peer can do at worst:
//
//   - One that is dead, or was never there, costs nothing: its stream has broken, and what it promised does not count.
//   - One that does not answer costs a lookup the deadline, and a load [stall], or what one read may take if it sends a little now and
//     then. After [mostFailures] in a row, or one such load, it is left alone, for a time that doubles up to [longestPause], and its loans are forgotten.
//   - A promise that it does not keep costs a round trip for each key, once, and is struck out.
//   - One whose bytes are not what was stored costs the load: they are verified like those of a disk before one reaches a page. The peer is
//     blamed: named in the log, counted, and left alone for [longestPause]. The entry is a miss.
//   - One that is offered an entry and does not answer costs a worker of the moves [offerTime], and one that offers what it does not send the same.
//     Neither a store nor a load waits for it. What is offered in its name from another address is no fault of that peer.
//   - One that says what cannot be, such as a piece larger than twice what the namespace's geometry gives, or a lease of no time, is blamed at once.
//   - One that sends no bytes costs the load, and where it says so the entry is a miss. A CANCELED of its own is a failure as any other.
//     Answers to asks do not make up for reads.
//   - One that lends nothing for long is asked less and less often: from [firstRest] to [longestRest].
//   - One that sends more than it was asked for is cut off. Fingerprints beyond [mostTable] bytes are not kept, and the last quarter of
//     them is not for a peer that has told more than the others.
//
// Each side moves at most so many bytes a second. The serving side holds at most [mostLent] leases of [mostLentKeys] keys together, of
// which a caller has at most as many as it leaves ([shares]), and pins at most half of a root, likewise. Connections are charged for the memory that
// they have it hold. A request for more is refused before anything is promised, and the caller keeps what it knows. A loan that is in use
// when half of its time is over is renewed. A connection ends when nothing that counts has signed its certificate.
package peers
