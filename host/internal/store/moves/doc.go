// Package moves copies entries between the levels of a store, in the background and behind everything else.
//
// A level is what is equally near to the engines: page-locked memory, disks, a shared file system. Entries are stored
// in the nearest one. What its evict policy names is offered to the next level before it goes ([Demotion]); what is
// granted from a farther level is offered to the nearest one ([Promotion]); what is written through is copied at once
// ([Through]); and what a lookup asks to come nearer is copied while its lease lasts ([Prefetch]). The store decides what
// is offered and asks the policies; this package carries the bytes:
//
//	Offer      a [Move] waits for a worker: what waits is bounded by the time that it takes, and what is worth least is shed
//	Run        a worker takes the most valuable move and gives it a [Copier]
//	Copy       a piece goes from a [Source] to a [Target] in parts, each within the budget of bandwidth
//
// What leaves the last level may be offered to another host, which fetches it ([Taker]), and what another host has offered comes as [Taken].
//
// A piece is copied as it is stored: header, checksum table and payload. Every checksum is compared on the way, and the
// target shows nothing before it is committed, so a copy is whole and right, or it is not there.
//
// Moves never delay loads for long: before each part a worker waits until no load is under way, but [Patience] at
// most, and a part is small. What leaves a level and cannot be copied before a put needs its bytes goes without, what was hit
// least first, which costs a later miss.
//
// # What a level can be
//
// A [Target] needs neither rename nor links: parts are written in order, once, and a commit ends them, as in an upload
// to object storage. A [Source] is read in order, too. Both may be slow: a worker that waits for one holds nothing but
// its buffer.
package moves
