// Package janitor bounds a directory that somebody else fills.
//
// What an evict policy needs to know of a cache can be read off its directory. A place policy says which
// entry a file is part of; the time that a file was last read or written is the time of the entry's last use. So the
// policies that a host evicts by bound a directory that no host has, also one that llm-d's or vLLM's file-system
// connector writes.
//
// A round goes through the directory and tells the policy what is new (INSERT, or RESIDENT in the first round, in order
// of last use), what was used since (TOUCH) and what is gone (REMOVE). When the files take more than the capacity, the
// policy names victims until they take no more than the low mark. A victim that was used since the round began is
// spared.
//
// A file that the place policy cannot identify is never touched, but its bytes count. The one exception is asked for:
// temporaries, *.tmp, that nobody has written to for a given time.
package janitor
