// Package gds reaches NVIDIA GPUs: their memory, the kernels that move pages, and cuFile.
//
// The one idea: everything that needs a CUDA context happens on a [Thread], one of a fixed set of operating system
// threads per [GPU] on which that GPU's primary context is current. The threads never end, because destroying a
// thread that the driver knows can take the process with it; a closed GPU's threads wait for the next one. Code asks
// for a thread with [GPU.Do] and keeps it for as long as it has work, so the hop is paid once a task and not once a
// call.
//
// The libraries are opened at run time and never closed, without cgo. Where they are missing, [Open] says so in one
// error ([ErrNoDriver]) and the same binary serves host memory. Symbols are looked up by their versioned names
// first. Calls made while bytes move allocate nothing: arguments go through a buffer of the thread.
//
// Every failed call is an [Error] with the library's code. Codes after which a context is lost ([Result.Sticky])
// take the GPU out of service: whatever is asked of it from then on fails with [ErrLost].
//
// Memory given to a GPU is never on the Go heap. Pages are moved between scattered addresses and one contiguous
// buffer by a [Batch]: a kernel where it can run, the driver's batch copy or single copies where it cannot.
// [Thread.Sum] makes the checksums of what stands in device memory, the same ones as the processor's.
//
// What is staged passes through a [Window] of device memory on its way between a slot and the pages: there the GPU
// makes the checksums, of the bytes that have crossed the bus, and nothing of a window with a wrong one reaches a
// page.
//
// [DirectRoute] moves whole files by cuFile, from and to slots of device memory that it knows. Its calls run on
// threads of their own ([GPU.DoFile]), and files stay registered with it in a bounded cache, [Handles]. Package fileio is
// the simple form, for any memory and any file.
package gds
