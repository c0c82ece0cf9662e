// Package replay plays a request trace against a running host and checks every byte that comes back.
//
// The one idea: a replay is a serving engine without a model. For each request it asks for the longest stored prefix,
// loads it, stores the rest, and ends the request, over the same socket and with the same client that an engine uses.
// What a page holds is a pure function of its chunk's key, the rank, the layer and the block, so that any loaded byte can
// be told right or wrong without remembering what was stored, also after a restart and from another process.
//
// Order within a request: LOOKUP, LOAD (which uses up the lease), STORE (awaited until published), END_REQUEST. Nothing
// is pinned while chunks are stored, and one session's requests follow each other strictly, so that with one session and
// on-demand eviction the policy sees exactly the trace's order.
//
// Sessions. Requests are dealt to N concurrent sessions such that a conversation stays with one and keeps its order: see
// [Dealer]. Each session is one engine with R ranks, each a client session of its own with its own memory.
//
// Checks before each load: the destination pages are overwritten with a poison pattern, and the block ids are drawn
// anew, so that neither stale bytes nor a wrong block can look right.
package replay
