// Package sim replays request traces against eviction policies and counts hits.
//
// The simulator is a host without files. It runs the same modules that production runs, through the same
// [policy.Evict], and sends them the events that a store would send. For each request, in order: a touch for each
// resident chunk; for each other chunk an ask for victims when the root is full, their removal, and the insert; then
// the end of the request. Keys are numbered densely when the trace is loaded, so that a resident chunk is an index
// into an array.
//
// With levels ([LevelGrid]) it is a host's own store, on file systems that keep sizes only. The store does no work in the
// background: the simulation makes its copies, one after the other on a clock of its own, so that every run gives the same result.
//
// All entries have one size. Without levels nothing is pinned: the touches and inserts of a request alternate as in the textbooks,
// so that miss ratios can be compared with published ones.
package sim
