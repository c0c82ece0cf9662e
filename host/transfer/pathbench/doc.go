// Package pathbench measures the whole path of stores and loads beside its ceilings, in one run.
//
// The one idea: a figure of ours stands beside what the same machine gave, in the same minutes, to code that does only one
// part of the work. A pass stores or loads all chunks through store and engine, checksums made and verified; the ceilings
// move the same bytes by the copy alone, between pages and slots, and by the same number of plain threads that write and
// rename, or read, files of the same size. The passes of a round alternate in order, the first round is not counted, and
// what counts is the median over the rounds of ours over the smaller ceiling of the same round, with its spread. Files of
// the last round are removed before stores, and the page cache is read twice before loads: what the kernel does for who comes
// first is charged to nobody. After every load all pages are compared byte by byte; block ids are shuffled and pages poisoned
// before.
//
// Layer-wise loads are measured beside the plain ones: how long the whole takes, and which part of that until the first
// layer of all chunks has landed.
package pathbench
