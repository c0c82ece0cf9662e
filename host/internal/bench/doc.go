// Package bench measures the whole path of stores and loads and its ceilings, in one run.
//
// The one idea: a figure of ours is next to what the same machine gave, in the same minutes, to code that does only one
// part of the work. A pass stores or loads all chunks, checksums made and verified; the ceilings move the same bytes by the
// copy alone, between pages and slots, and by the same number of plain threads that write and rename, or read, files of
// the same size. The passes of a round alternate in order, the first round is not counted, and what counts is the median
// over the rounds of ours over the smaller ceiling of the same round, with its spread. The last round's files are removed
// before a round. After every load all pages are compared byte by byte; block ids are shuffled and pages poisoned before.
//
// A first load reads what was stored and not read since, as most loads of an engine do, and the plain threads
// read fresh files of their own: the kernel marks every page of a file in memory when it is first read, which costs as
// much as a third of the rate. Later loads read the same files again. Layer-wise loads come last: how long the whole takes,
// and which part of that until the first layer of all chunks has landed.
//
// A client stores and loads through hosts in processes of their own, as an engine does: a job for each prompt, and a lookup before
// each load. Settings of compression are compared: each has a host of its own and the same pages, in the same rounds.
// The pages have values of a normal distribution, since what compression gains depends on them.
//
// Several clients, each with a GPU of its own, go through one host at once and begin and end every pass together, the ceilings too. Rates of
// all are as many times that of the slowest.
package bench
