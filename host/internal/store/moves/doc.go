// Package moves copies entries between the levels of a store, in the background and with the lowest priority.
//
// A level is a set of roots that are equally near to the engines, such as page-locked memory, disks or a shared file system.
// Entries are stored in the nearest level. An entry that the evict policy names is offered to the next level before it leaves
// ([Demotion]). An entry that is granted from a farther level is offered to the nearest one ([Promotion]). With write-through,
// an entry is copied at once ([Through]). An entry that a lookup requests nearer is copied while its lease lasts ([Prefetch]).
// The store decides about offers and asks the policies. This package carries the bytes:
//
//	Offer      a [Move] waits for a worker; the waiting moves are bounded by the time that they need, and the least valuable are shed
//	Run        a worker takes the most valuable move and gives it a [Copier]
//	Copy       a piece goes from a [Source] to a [Target] in parts, each within the budget of bandwidth
//
// An entry that leaves the last level may be offered to another host, which fetches it ([Taker]). An entry that another host
// has offered is fetched as [Taken].
//
// A piece is copied as it is stored: header, checksum table and payload. Every checksum is verified on the way, and the target
// shows nothing before it is committed. A copy is therefore complete and correct, or it does not exist.
//
// Moves never delay loads for long. A part is small, and before each part a worker waits until no load is running, for at most
// [patience]. An entry that leaves a level and has no copy when a put needs its bytes goes without one. Entries with the fewest
// hits go first. The cost is a later miss.
//
// # Requirements on a level
//
// A [Target] needs neither rename nor links: parts are written once and in order, and a commit ends them, as in an upload to
// object storage. A [Source] is read in order, too. Both may be slow: a worker that waits for one holds only its buffer.
package moves
