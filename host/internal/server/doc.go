// Package server is the daemon's side of sessions.
//
// Everything that a client can hold (a mapping, a lease, a job, a request) belongs to its session, and a session
// ends in one place and one order: no message is handled any more, its jobs are cancelled, their fences are awaited,
// its leases are released, and only then its memory is unmapped. So a client that dies at any moment leaves nothing
// behind.
//
//	reader -> (at once, or the executor) -> store, engine -> outgoing queue -> writer
//
// Each session has a reader, an executor and a writer. The reader never waits for storage: reservations have a queue of
// their own, and only a DISCARD waits for that, so all else is answered while a STORE waits for space. Until its copies
// start, a cancelled job completes at once; a reservation that hangs in the store is left behind and aborted when it
// returns. Completions come from the engine's goroutines, which only queue them: a client that does not read its
// messages stalls its own reader and finally loses its session, and no other client notices.
//
// Sessions with one engine id share an engine record: what they agree on, the leases that any of them may load
// under, and the numbers of the engine's requests.
//
// [Latencies] and [Usage] count what sessions ask for and how long they wait: a histogram for each kind of answer, and keys, hits
// and bytes for each model and tenant. Recording allocates nothing and takes no lock. [RequestSpans] say what became of single
// requests.
package server
