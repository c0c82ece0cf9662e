// Package bench measures the whole path of stores and loads, and its ceilings, in one run.
//
// A figure of a host is compared with the figure of code that does only one part of the work, on the same machine and in the same minutes.
// A pass stores or loads all chunks, and makes and verifies checksums. There are two ceilings: the plain copy of the same bytes between
// pages and slots, and the same number of plain threads that write and rename, or read, files of the same size. The passes of a round
// alternate in order, and the first round is not counted. The result is the host's rate divided by the smaller ceiling of the same round:
// the median over the rounds, with its spread. The files of the last round are removed before a round. Before every load block ids are
// shuffled and pages are poisoned, and after it all pages are compared byte by byte.
//
// A first load reads chunks that were not read since they were stored, as most loads of an engine do. The plain threads read new files of
// their own. The difference matters because the kernel marks every page of a file in memory at its first read, which costs up to a third of
// the rate. Later loads read the same files again. Layer-wise loads come last. For them the bench measures the whole time, and the part of
// it until the first layer of all chunks has arrived.
//
// A client stores and loads through hosts in processes of their own, as an engine does: with a job for each prompt, and a lookup before
// each load. To compare settings of compression, each has a host of its own with the same pages, in the same rounds. The pages have values
// of a normal distribution, because the gain of compression depends on them.
//
// Several clients, each with a GPU of its own, use one host at the same time. They begin and end every pass together, including the
// ceilings. The rate of all clients is the rate of the slowest times their number.
package bench
