// Package doctor reports, before a host starts, which route its bytes will take on this machine, and why.
//
// Probing and judging are separate. [Probe] tries things and records what it saw ([Facts]). It trusts nothing that it
// can try: it writes a root's file with direct I/O and reads it back, and registers the file with cuFile. [Judge] is
// a pure function from the configuration's wishes and the facts to a [Report]: a verdict for each pair of GPU and
// root, and findings, each with its fix in one line. [Report.Write] prints it.
//
// Probing leaves nothing behind: it removes its files and does not create a missing root.
package doctor
