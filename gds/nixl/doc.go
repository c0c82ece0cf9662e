// Package nixl moves bytes between the memory of hosts: by NIXL, where UCX finds a way to read another's memory: InfiniBand, RoCE, or a
// process of the same machine. Over TCP alone there is none.
//
// The library is libnixl_capi, the C interface that NVIDIA's wheels have since 1.5. It is opened at run time, without cgo, and never
// closed. [Open] finds it, and refuses one that is a stub, or lacks a function that is used.
//
// An [Agent] has registered memory ([Agent.Register]), which the agents of others may read and write from then on, once they have its
// [Agent.Metadata]. UCX knows neither users nor encryption: who reaches the agent's ports, or is told its metadata, may be able to read
// and write what is registered, and with some transports all memory of the process. Let none but trusted machines reach it.
//
// A [Read] of an agent's memory is begun by [Agent.Read], and goes on in the background. It has its destination until it has ended,
// whatever became of its caller: NIXL cannot stop one, so [Read.Done] is asked until it says so. Only [Agent.Close] ends it earlier.
// One from a process that was stopped ends when that goes on, or dies.
//
// Sizes and addresses are in bytes, as in the header, src/api/c/nixl_capi.h of github.com/ai-dynamo/nixl.
package nixl
