// Package nixl moves bytes between the memory of hosts by NIXL. It needs a transport by which UCX can read another
// host's memory: InfiniBand, RoCE, or a process of the same machine. TCP alone is not enough.
//
// The library is libnixl_capi, the C interface that NVIDIA's wheels have since 1.5. It is opened at run time, without
// cgo, and never closed. [Open] finds it, and refuses a stub or a library that lacks a function.
//
// An [Agent] has registered memory ([Agent.Register]), which other agents can read and write once they have its
// [Agent.Metadata]. UCX has neither users nor encryption. Anyone who reaches the agent's ports, or has its metadata,
// may be able to read and write registered memory, and with some transports all memory of the process. Let only trusted
// machines reach it.
//
// [Agent.Read] begins a [Read] of another agent's memory, which runs in the background. The read uses its destination
// until [Read.Done] reports its end, even if its caller has gone, since NIXL cannot stop a read. Only [Agent.Close]
// ends it earlier. A read from a stopped process ends when that process continues or dies.
//
// Sizes and addresses are in bytes, as in the header, src/api/c/nixl_capi.h of github.com/ai-dynamo/nixl.
package nixl
