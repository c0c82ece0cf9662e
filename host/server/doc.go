// Package server is the daemon's side of sessions.
//
// The one idea: everything that a client can hold (a mapping, a lease, a job, a request) belongs to its session, and
// a session ends in one place and one order: no message is handled any more, its jobs are cancelled, their fences
// are waited for, its leases are released, and only then its memory is unmapped. So a client that dies at any moment
// leaves nothing behind.
//
//	reader -> (idle? at once : executor) -> store, engine -> outgoing queue -> writer
//
// Each session has a reader, an executor and a writer. The reader never waits for storage, so CANCEL and PING are
// heard while a STORE makes room, and are not held up by it: until its copies begin, a job is over with its cancel,
// and a reservation that hangs in the store is left to itself, to be given up when it returns. Completions come from
// the engine's goroutines and are queued, never sent, by them: a client that does not read stops its own reader
// first and loses its session in the end, and nobody else notices.
//
// Sessions with one engine id share an engine record: what they agree on, the leases that any of them may load
// under, and the numbers of the engine's requests.
package server
