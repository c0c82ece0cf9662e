// Package staging is the CPU side of moving bytes: memory for devices, file I/O with and without the page cache, and
// goroutines for blocking calls. It has no notion of chunks, keys or policies.
//
// All file I/O of the host goes through [FS] and [File], so that a test can inject every failure of storage.
//
//   - [OS] is the operating system's [FS]. It keeps the errno, retries EINTR and completes short transfers.
//   - [Below] is the [FS] of some directories, out of which no link leads.
//   - [OpenDirect] opens a file with O_DIRECT where the device supports it.
//   - [Watched] abandons an operation that exceeds its time limit, so that a mount that hangs blocks nothing else.
//   - [Meter] measures the speed of single transfers of files, and [Bandwidth] is one direction of it.
//   - [Slots] is a fixed pool of page-aligned memory outside the Go heap, suitable for O_DIRECT and for pinning.
//   - [MemoryFile] is a file in memory of this process; package host/internal/memfs has such files.
//   - [Workers] runs blocking calls on a fixed number of goroutines and favours reads over writes by a ratio.
//   - [Walk] visits the files below a directory on several goroutines.
//   - [Topology] tells which CPUs and devices are near each other.
//
// Package faultfs has test doubles, which inject errors and simulate a loss of power, and the suite that every [FS]
// passes.
package staging
