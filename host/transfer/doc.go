// Package transfer moves chunks between a client's memory and piece files.
//
// The one idea: a job is a set of independent tasks, one per piece, and a fence. A task runs on a worker of its device's
// queue, fills or drains one aligned slot at a time, and touches the client's pages only inside the job's fence. Once
// the fence is closed, by completion or by cancel, nothing of the job can touch those pages again, even when the I/O
// under a task hangs: a read that comes back late finds the fence shut and its bytes go nowhere. So a job always
// completes exactly once, and a cancel can be acknowledged without waiting for a disk.
//
//	store:  pages --gather+checksum--> slot --WriteAt--> temporary --publish--> piece
//	load:   piece --ReadAt--> slot --verify, then scatter--> pages
//
// Pages are reached through [Memory] only, as (plane, block id); host memory is one implementation, a GPU another. A
// cancel also stops what a GPU is copying. A
// load's bytes are verified extent by extent before any of them reaches a page. Every error is carried to the chunk it
// belongs to and to no other.
//
// On the way between a slot and a GPU's pages bytes stand for a moment in a window of device memory, where the GPU makes the
// checksums: the processor is left with its reads and writes. What windows do wrong goes without them.
//
// Between a GPU's pages and a root's files there may be a direct route beside the staged one ([Engine.SetRoute]): the file
// stands in device memory, and cuFile moves it. What fails there is staged in the same task; a route that fails three
// times in a row is left, and tried again with single operations. Layer-wise loads are staged: they read a file in parts.
package transfer
