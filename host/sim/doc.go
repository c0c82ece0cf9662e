// Package sim replays request traces against eviction policies and counts.
//
// The one idea: the simulator is a host without files. It runs the very modules that production runs, through the same
// [policy.Evict], and sends them the events that a store would: per request, in order, a touch for each chunk that is
// resident, and for each that is not a question for victims when the root is full, their removal, and the insert; then
// the request's end. What differs is only what costs time there and means nothing here: keys are numbered densely when
// the trace is loaded, and a resident chunk is a place in an array.
//
// Entries all have one size. Nothing is pinned: a request's touches and inserts follow each other as in the textbooks, so
// that miss ratios can be compared with published ones.
package sim
