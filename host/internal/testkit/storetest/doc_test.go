// The tests of package storetest run stores through random histories: lists of operations that run next to a model of what may be
// served. They know a store by an interface ([Store]) and by what lies on disk.
//
// What must hold after every operation: a load returns bytes that were offered under its names, or fails; a piece whose
// load failed is a miss from then on; no root takes more than its capacity, however many hosts share it; the account of
// a root covers what lies on its disk. At the end of a history every host is killed and opened again: then nothing is
// pinned, no temporary is left, accounts and disk agree, and the process has no goroutine and no descriptor more than
// before. Porcupine then looks for an order of all stores, grants, loads and discards of each piece, and of the ends of
// leases, by which a root that does one at a time, and evicts what has no lease, would have given the same results.
//
// A seed makes a [History], and a history is text: a few settings, the fault rules, and one operation per line.
//
//	kind faults
//	seed 10
//	host a strict
//	fault write ** 2% seed 3077: enospc
//
//	a.Open(evict=liar:7, place=4/4)
//	a.Store(entry=0/17)                     // <nil>, <nil>
//	a.Begin(put=3, piece=0/5/1)             // <nil>
//	a.Lookup(entry=0/17, n=4, ranks=0110)   // 2 hits
//
// Everything is drawn when the history is generated, so a history that is cut short still means something: an
// operation on a put, a lease or a host that is not there does nothing. A history repeats, because one goroutine runs
// all operations and hosts that share a root take turns. The exception is Rush, in which several clients work at once.
//
// The operations, on the host before the dot:
//
//	Open(evict, place, unplug)      opens the store, with these policies; the machine loses power at call unplug
//	Close(unplug)                   closes it in order; likewise
//	Crash()                         kills its process, wherever its puts are
//	PowerLoss(seed)                 its machine loses power: what was not synced may be lost
//	Arm(call, power, seed)          the call-th operation on files from now on fails, and all later ones (the process
//	                                dies there), or, with power, the machine loses power there
//	Store(entry)                    stores both pieces of an entry
//	Begin(put, piece)               reserves room for a piece
//	Publish(put)                    writes it and publishes it
//	Abort(put, written)             gives it up, after it was written or before
//	Lookup(entry, n, ranks, hold)   looks n keys up and loads of the i-th hit the rank at ranks[i]; hold keeps the lease
//	Release(lease, ranks)           loads again what ranks says, and releases a lease
//	EndRequest()                    ends the request that all puts belong to
//	Maintain(root, task)            lets the store do a part of its upkeep: retry or probe
//	Swap(role, policy)              replaces a policy while the store works
//	Damage(file, how, at, bytes)    flips, cuts or removes the file-th piece file behind the store's back
//	Turns(n)                        all hosts of the shared root make n steps
//	Sleep(n)                        the host misses its next n steps
//	Pause(entry, step, call, asleep, awake, fill)
//	                                stores an entry, or makes a step; the call-th operation on files stops before it begins
//	                                until the host has missed asleep steps, and has made awake others if it can; meanwhile
//	                                the other hosts store what fill says
//	Rush(clients, swap)             several clients at once, each a host and a seed, beside a swap of the evict policy
//	Finish(evict, place)            the policies of the last life, at the end of the history
package storetest
