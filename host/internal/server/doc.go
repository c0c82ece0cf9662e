// Package server implements the sessions of a host with its clients.
//
// Everything that a client can hold (a mapping, a lease, a job, a request) belongs to its session. A session ends in one place
// and in a fixed order: messages are no longer handled, jobs are cancelled, the fences of the jobs are awaited, leases are
// released, and only then memory is unmapped. A client that dies at any moment therefore leaves nothing behind.
//
//	reader -> (at once, or the executor) -> store, engine -> outgoing queue -> writer
//
// Each session has a reader, an executor and a writer. The reader never waits for storage. Reservations have a queue of their
// own, and only a DISCARD waits for that queue, so all other messages are answered while a STORE waits for space. A job that is
// cancelled before its copies start completes at once. If its reservation hangs in the store, the reservation is abandoned and
// is aborted when it returns. Completions come from goroutines of the transfer engine, which only queue them. A client that
// does not read its messages therefore stalls only its own reader, and finally loses its session.
//
// Sessions with the same engine id share a record of the engine. The record holds the properties that the sessions must agree
// on, the leases that any of them may load under, and the numbers of the engine's requests.
//
// [Latencies] is a histogram of answer times for each kind of answer. [Usage] counts keys, hits and bytes for each model and
// tenant. Recording in either allocates nothing and takes no lock. [RequestSpans] traces single requests.
package server
