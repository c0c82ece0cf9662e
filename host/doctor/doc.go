// Package doctor says, before a host is started, which path its bytes will take on this machine, and why.
//
// The one idea: finding out and judging are apart. [Probe] tries things and writes down what it saw ([Facts]); nothing is
// taken from configuration that can be tried, so a root's direct I/O is written and read back, and cuFile is asked to take a
// file of it. [Judge] is a pure function from what is wanted and what was seen to a [Report]: a verdict for each pair of GPU
// and root, and findings, each with its fix in one line. [Report.Write] prints it.
//
// Probing leaves nothing behind: files of its own are removed, and a root that is missing is not made.
package doctor
