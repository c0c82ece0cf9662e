// Package sim replays request traces against eviction policies and counts hits.
//
// The simulator is a host without files. It runs the same modules that production runs, through the same
// [policy.Evict], and sends them the events that a store would send. For each request, in order: a touch for each
// resident chunk; for each other chunk an ask for victims when the root is full, their removal, and the insert; then
// the end of the request. Keys are numbered densely when the trace is loaded, so that a resident chunk is an index
// into an array.
//
// With levels ([LevelGrid]) it is a host in which a chunk may have a copy in each level, with an instance of the evict policy for
// every level and one admit policy, which decides what an eviction demotes and what a load promotes.
//
// All entries have one size. Nothing is pinned: the touches and inserts of a request alternate as in the textbooks,
// so that miss ratios can be compared with published ones.
package sim
