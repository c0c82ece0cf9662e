// Package trace reads request traces.
//
// A trace is a stream of requests, one JSON object per line, in the format of published serving traces:
//
//	{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353]}
//
// The timestamp is in milliseconds from the start of the trace, the lengths are in tokens, and each hash id stands
// for one block of the prompt together with everything before it: ids are chained, so an id has exactly one parent. A
// reader takes plain text, gzip and zstd, recognised by their first bytes, and needs memory for one line only.
//
// "output_length" may be missing. Three more keys are optional, and carry what an engine tells policies when a request ends: "end_reason" ("stop",
// "length", "tool_call" or "abort"), "priority" (a whole number, lower goes first) and "return_ms" (milliseconds until the
// prefix is expected to be used again). Other keys are ignored.
package trace
