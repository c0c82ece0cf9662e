// Package gds reaches NVIDIA GPUs: their memory, the kernels that move pages, and cuFile.
//
// Everything that needs a CUDA context runs with a [Thread], one of a fixed set per [GPU], while that GPU's primary context is
// current. [GPU.Do] takes one for a whole task, which runs on the caller's operating system thread. The threads for cuFile
// calls and imports are operating system threads of their own. None of them ends, because destroying a thread that the driver
// knows can crash the process. The threads of a closed GPU are kept for the next one.
//
// The libraries are opened at run time, without cgo, and never closed. If they are missing, [Open] returns
// [ErrNoDriver], and the same binary serves host memory. Symbols are looked up by their versioned names first. Calls
// made while bytes move allocate nothing: arguments go through a buffer of the thread.
//
// A failed call is an [Error] with the library's code. A code that loses the context ([Result.Sticky]) takes the GPU
// out of service: every later use of it fails with [ErrLost].
//
// Memory given to a GPU is never on the Go heap. A [Batch] moves pages between scattered addresses and one
// contiguous buffer: by a kernel, or else by a copy of each piece. [Thread.Sum] computes the
// checksums of device memory; they are the same as the CPU's.
//
// Staged bytes pass through a [Window] of device memory between a slot and the pages. There the GPU computes the
// checksums from the bytes that crossed the bus, and a window with a wrong checksum reaches no page. Next to it, a
// [Coder] encodes and decodes compressed extents, so that only stored bytes cross the bus.
//
// [DirectRoute] moves whole files by cuFile, between storage and slots of device memory that are registered with it.
// Its calls run on separate threads ([GPU.DoFile]), and files stay registered in a bounded cache, [Handles]. Package
// fileio is the simple form, for any memory and any file.
package gds
