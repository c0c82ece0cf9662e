// Package staging is the CPU's side of moving bytes: memory that may be handed to devices, files that may be written
// past the page cache, and threads that may block.
//
// The one idea: everything that can block, run short, be refused or lie is behind a small interface with a twin that
// does so on purpose. Above this package nobody opens a file by another way, and every failure of storage that a test
// can think of is a rule of [Faulty] away.
//
//   - [FS] and [File] are the file operations of the host. [OS] is the real one: errno kept, EINTR retried, short
//     transfers finished. [OpenDirect] opens past the page cache where the mount takes it. [Faulty] is the twin.
//   - [Volatile] is a machine that can lose its power, and with it what was not synced.
//   - [Watched] gives up an operation that takes too long, so that a mount that hangs keeps nobody but itself.
//   - [Slots] is a fixed pool of page-aligned memory outside the Go heap, fit for O_DIRECT and for being pinned.
//   - [Workers] runs blocking calls on a fixed number of goroutines, reads before writes by a ratio.
//   - [Topology] reads which CPUs and devices are near each other.
//
// Nothing here knows of chunks, keys or policies.
package staging
