// Package doctor reports, before a host starts, which route its bytes will take on this machine, and why.
//
// Probing and judging are separate. [Probe] tests the machine and returns the results as [Facts]. It tests everything
// that can be tested: it writes a file in a root with direct I/O, reads it back, and registers it with cuFile. [Judge]
// is a pure function of the configuration and the facts. Its [Report] has a verdict for each pair of GPU and root, and
// findings, each with a remedy in one line. [Report.Write] prints it.
//
// Probing leaves nothing behind: it removes its files and does not create a missing root.
package doctor
