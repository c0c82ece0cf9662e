// Package replay replays a request trace against a running host and checks every byte that comes back.
//
// A replay is a serving engine without a model. For each request it looks up the longest stored prefix, loads it,
// stores the rest, and ends the request, over the same socket and with the same client as an engine. The content of a
// page is a pure function of its chunk's key, the rank, the layer and the block. So every loaded byte can be checked
// without remembering what was stored, also after a restart and from another process.
//
// The order within a request is LOOKUP, LOAD (which consumes the lease), STORE (until published), END_REQUEST.
// Nothing is pinned while chunks are stored, and the requests of a session follow each other strictly. So with one
// session and on-demand eviction the policy sees exactly the trace's order.
//
// Requests are dealt to N concurrent sessions such that a conversation stays in one and keeps its order: see
// [dealer]. Each session is one engine with R ranks, and each rank is a client session with its own memory.
//
// Before each load the destination pages are overwritten with a poison pattern, and the block ids are drawn again, so
// that neither stale bytes nor a wrong block can look right.
package replay
