// Package transfer moves chunks between a client's memory and piece files.
//
// A job is a set of independent tasks, one per piece, and a fence. A task runs on a worker of its device's queue, fills
// or drains one aligned slot at a time, and touches the client's pages only inside the job's fence. Once the fence is
// closed, by completion or by cancellation, no task of the job can touch those pages again, even if its I/O hangs: a
// late read finds the fence closed, and its bytes are dropped. A job therefore completes exactly once, and a cancel is
// acknowledged without waiting for a disk.
//
//	store:  pages --gather+checksum--> slot --WriteAt--> temporary --publish--> piece
//	load:   piece --ReadAt--> slot --verify, then scatter--> pages
//
// Pages are reached through [Memory] only, as (plane, block id). Host memory is one implementation, a GPU is another; a
// cancel also stops copies of a GPU. A load's bytes are verified extent by extent before any of them reaches a page. An
// error fails the chunk it belongs to and no other.
//
// Between a slot and a GPU's pages, bytes pass through a window of device memory, where the GPU computes the checksums,
// and the CPU only reads and writes files. Without a window the CPU computes them.
//
// A route moves bytes between pages and a root's files: by a root's own memory, by cuFile from and to a GPU
// ([Engine.SetRoute]), or by slots and file I/O. The routes are asked in this order. The staged route takes every piece
// that the others refuse, and all layer-wise loads of files. A direct operation that fails is staged within the same
// task. A direct route that fails three times in a row is suspended, and probed later with single operations.
//
// A GPU codes compressed pieces next to a window, so that only stored bytes cross the bus. For other memory, and after
// a failure of the GPU, the processor codes them between the two parts of a slot.
package transfer
