// Package peers lets hosts lend each other their cache entries, so that a prompt's prefix on a neighbouring node is a hit on
// this one.
//
// # How it works
//
// Each host streams the fingerprints of its resident entries to the others: first all of them, then every change. A [Table] in
// memory records which peers have which entry, so a lookup that misses needs no message to learn whether a peer can help. Only
// if the table has a promise are the peers asked for leases, all at once and within one deadline, and the lookup is repeated.
//
// Borrowed entries belong to one more root of the store, behind all others. Its file system ([FS]) reads each piece from its
// lender. Verification, layer-wise loads, promotion to nearer levels and the handling of failures are therefore the same as for
// every other root. When a lease ends, its entries leave the index.
//
// A peer answers only for its own roots. Roots in buckets are excluded, because the other hosts reach the bucket just as fast.
// A host never asks a third host on behalf of a peer, so requests cannot loop. Namespaces are named by digest, and the digest
// of a private tenant's namespace is unique to that tenant.
//
// The hosts together aim to keep one copy of a chunk. A loan counts as a use for the lender's eviction policy, and a borrowed
// entry is not copied to the last level. When the last level evicts an entry that no other host has, the entry is offered to
// the peer with the slowest turnover, which fetches it if it wants it.
//
// If both hosts have NIXL, and UCX finds a transport between them, loads read from the lender's memory. The stream of residents
// carries the metadata of the lender's agent, the Place call returns the address of a piece, and package gds/nixl issues the
// READ. A READ cannot be cancelled. If one is abandoned or fails, its error says that the destination is still in use
// ([staging.Held]), the slot is kept until the READ ends, and the peer is read by gRPC.
//
// # Peers that misbehave
//
// The list below gives the most harm that a peer can do.
//
//   - A peer that is dead or was never there costs nothing: its stream is broken, so its promises do not count.
//   - A peer that does not answer costs a lookup its deadline. It costs a load the time [stall], or the whole budget of a read if it sends a few bytes now and then. After [mostFailures] failures in a row, or after one such load, the peer is left alone for a time that doubles up to [longestPause], and its loans are dropped.
//   - A broken promise costs one round trip for each key and is then removed from the table.
//   - Wrong bytes cost the load. They are verified before they reach a page, as bytes from a disk are. The peer is named in the log, counted, and left alone for [longestPause]. The entry is a miss.
//   - A peer that is offered an entry and does not answer occupies one worker of the moves for [offerTime], and so does a peer that offers an entry and does not send it. Neither a store nor a load waits for that worker. An offer in a peer's name from another address is not held against that peer.
//   - An impossible value is held against the peer at once. Examples are a piece larger than twice the size that the namespace's geometry gives, and a lease of no duration.
//   - A peer that sends no bytes costs the load. If it reports an error, the entry is a miss. The status CANCELED from a peer counts as a failure like any other. Good answers to lease requests do not make up for failed reads.
//   - A peer that lends nothing for long is asked less and less often: the interval grows from [firstRest] to [longestRest].
//   - A peer that sends more bytes than requested is cut off. Fingerprints beyond [mostTable] bytes are not kept, and the last quarter of the table is closed to a peer that has announced more than its equal part.
//
// # Limits
//
// Each side moves a bounded number of bytes a second. The lender has at most [mostLent] leases with [mostLentKeys] keys in
// total. A caller's part of them is bounded by [shares], and so is its part of the entries that leases pin, which are at most
// half of a root. Connections are charged for the memory that they occupy, and for the processor time that their arrivals take
// ([arrivals.Effort]). A peer that is called is charged in the same way for its list, and for frames that follow from no call. A
// request beyond a limit is refused before anything is promised, and the caller keeps its knowledge of the peer. A loan still in
// use after half of its time is renewed. A connection is closed once its certificate is no longer signed by a trusted authority.
package peers
