// Package sandbox runs one WebAssembly guest safely: it scans and verifies a module, loads its compiled form, starts
// instances, and makes every call into one. It knows exports, buffers and status codes; package policy knows the
// decisions. abi/SPEC.md is the contract. The rest of this comment explains decisions that concern several files.
//
// # Numbers only, in buffers that the guest owns
//
// Entering a guest costs tens of nanoseconds. Parsing, allocation or a second copy costs more than the decision. A
// batch of records that both sides read in place costs a few nanoseconds per event. Guests in any language can provide
// a static array, while an allocator that both sides share is a common source of leaks. A view of a buffer is made
// again after each call, because a call may have grown, and so moved, the memory.
//
// # No WithCloseOnContextDone
//
// It is wazero's way to stop a guest. It costs about 500 ns and three allocations per call and a call into Go per loop
// iteration, and it does not stop recursion without loops. Since a guest cannot be preempted, a spinning guest would
// also hold up the garbage collector and with it every transfer; a deadline that is checked later would be too late. So
// modules count their own instructions: package meter rewrites them, and [Instance.Call] sets the fuel before each
// call. It costs 2 to 5 % of a batch of events. Work that the host does for the guest (logging, random bytes) is
// charged as well.
//
// # Fuel in slices
//
// Fuel counts instructions, and the most expensive one, a load that misses every cache, takes a hundred times as long
// as most. The worst case of an honest policy would be 35 ms of such loads. So a guest gets its fuel in slices of tens
// of microseconds and calls into the host for the next one (refuel.go). At each such call the CPU time is checked, and
// Go's scheduler and garbage collector get control, so that even the setup of a guest delays others by no more than 2
// ms. A watchdog could not check the time, because it would wait for a collector that waits for the guest. Nearly all
// calls need one slice, and pay nothing for this. Charging more for loads was tried and rejected: to bound the worst
// case, loads must cost so much that honest guests run out of fuel.
//
// The time is the CPU time of the thread, so that a busy machine causes no fault of an innocent guest. A slice counts
// for 1.5 ms at most, so that a pause of the hypervisor causes no fault.
//
// # Fuel limits
//
// A call gets a fixed amount and more per record: see fuel.go. With the first-party policies, all in Go, on hard roots,
// 256 events take lru 0.3 million at most, and naming 1,024 victims among 100,000 entries takes the others up to 1.5
// million. Go guests use several units where C uses one, because their functions are one big switch that is charged in
// coarse steps. A module that needs more than the default states it in its manifest, up to 6 million per call, and gets
// fewer events per call if they are expensive. Beyond that the operator must allow it.
//
// # An instance dies of its first fault
//
// wazero would accept further calls of a trapped guest, in a state that its author never considered. A new instance
// costs milliseconds, and the host replays the residents to it.
//
// # _initialize is called by hand
//
// wazero runs start functions while it instantiates. A module's first code is guest code like any other and is called
// in the same way. A start section, which cannot be held back, is refused.
//
// # A child process compiles
//
// A module can make a compiler use more memory than a machine has, or run for minutes (figures:
// host/docs/rationale.md). So a child validates, meters and compiles. It is this executable, started again with another
// name as its first argument ([processName]): the package's init recognizes the name and compiles instead of running
// the program, so that every program that links the package, tests and embedders included, can compile without a line
// of its own.
//
// The child limits itself before it reads the module: memory by RLIMIT_DATA, processor time by RLIMIT_CPU, file sizes
// by RLIMIT_FSIZE, no core dumps. The kernel kills it first when memory is short. The parent limits the elapsed time,
// and kills the child when the context ends. The child ends when the parent does.
//
// The result is in the [Cache], or in a temporary directory when there is none: the metered module, and wazero's cache
// file with the machine code. The parent loads that file and never compiles ([withoutCompiling]). The load repeats the
// validation in the parent, which a module can also make slow. So the child rehearses the load and refuses a module
// that costs too much.
//
// # Sections are read before the module is compiled
//
// Compiling a Go guest takes half a second, too long to find out that it has no marker. The scan can give an author a
// remedy ("build with -buildmode=c-shared"), which a validator cannot. It also protects the validator and the compiler,
// which reserve memory for as many names or bytes as a module claims: a module of 200 bytes would end the host. So the
// scan walks every section to its end, and removes custom sections ([Scan.Compilable]).
package sandbox
