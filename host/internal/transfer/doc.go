// Package transfer moves chunks between a client's memory and piece files.
//
// A job is a set of independent tasks, one per piece, and a fence. A task runs on a worker of its device's queue,
// fills or drains one aligned slot at a time, and touches the client's pages only inside the job's fence. Once the
// fence is closed, by completion or by cancellation, nothing of the job can touch those pages again, even when the
// I/O under a task hangs: a late read finds the fence closed and its bytes are dropped. So a job always completes
// exactly once, and a cancel can be acknowledged without waiting for a disk.
//
//	store:  pages --gather+checksum--> slot --WriteAt--> temporary --publish--> piece
//	load:   piece --ReadAt--> slot --verify, then scatter--> pages
//
// Pages are reached through [Memory] only, as (plane, block id). Host memory is one implementation, a GPU is
// another; a cancel also stops what a GPU is copying. A load's bytes are verified extent by extent before any of
// them reaches a page. An error fails the chunk it belongs to and no other.
//
// Between a slot and a GPU's pages, bytes pass through a window of device memory, where the GPU computes the
// checksums; that leaves reads and writes to the CPU. Without a window the CPU computes them.
//
// Each way of bytes between pages and a root's files is a route: a root's own memory, cuFile from and to a GPU
// ([Engine.SetRoute]), or slots and file I/O. The routes are asked in this order, and a piece that the others refuse is
// staged, as are all loads by layers of files. A direct operation that fails is staged within the same task; a direct route
// that fails three times in a row is suspended, and probed later with single operations. A GPU codes compressed pieces next to
// a window, so that only stored bytes cross the bus; of other memory, and where that fails, the processor codes them between
// the two parts of a slot.
package transfer
