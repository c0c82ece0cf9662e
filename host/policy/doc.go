// Package policy runs the decisions that kvhost leaves to others: which entries go, which are stored, what their files
// are called and how their bytes are ordered.
//
// The one idea: the rest of the host asks a [Module] for an [Evict], [Admit], [Place] or [Layout] and never learns
// whether WebAssembly or native Go answers. Every call into a guest is made by one internal type, instance, so that the
// fence has one place to live: pointers checked, answers judged, a fault turned into an [ErrFault] and the instance
// dropped. abi/SPEC.md is the contract; here is why the host's side of it is as it is.
//
// # Why numbers only, in buffers that the guest owns
//
// Entering a guest costs tens of nanoseconds; anything that is parsed, allocated or copied twice costs more than the
// decision. A batch of records that both sides read in place costs a few nanoseconds per event. Guests in any language
// can offer a static array; an allocator that crosses the border is where other plugin systems leak.
//
// # Why a batch is written straight into the guest's memory
//
// [Evict.Event] stores into the guest's EVENTS buffer and is small enough to be inlined: about 3 ns. The view is taken
// anew after each call, because a call may have grown, and so moved, the memory.
//
// # Why one runtime per module
//
// Modules in one wazero runtime can import each other's exports and memories. Policies come from different hands. Each has
// a [wazero.CompilationCache] of its own, too, on the files of all: one that is shared keeps in memory what it was ever asked
// to compile, and a host that swaps policies for a year must not grow.
//
// # Why not WithCloseOnContextDone
//
// It is wazero's own way to stop a guest. It costs about 500 ns and three allocations per call and a call into Go per
// loop iteration, and it does not stop recursion without loops. Since a guest cannot be preempted, a spinning one also
// holds up the garbage collector and with it every transfer; a deadline that is looked at later would be too late. So
// modules count for themselves: package meter rewrites them, and the one place that makes calls sets the fuel before each.
// It costs 2 to 5 % of a batch of events. What the host does at a guest's word (logging, random bytes) is charged there.
//
// # Why fuel comes in slices
//
// Fuel counts instructions, and the dearest of them, a load that misses every cache, takes a hundred times as long as most.
// What honest policies need at their worst would be 35 ms of such loads. So a guest gets its fuel in slices of tens of
// microseconds and calls into the host for the next one (slices.go): there the processor's time that it took is looked at, and
// there Go's scheduler and garbage collector find it, so that even a guest that is being set up holds nobody else up for more
// than 2 ms. A time that a watchdog looked at could not be: it would wait for a collector that waits for the guest. Calls
// that need one slice, which are nearly all, pay nothing for that. Dearer loads were tried and would not do: to bound the
// worst they must cost what leaves honest guests without room.
//
// It is the processor's time of the thread, so that a busy machine faults nobody who is innocent, and a slice counts for 1.5
// ms at most, so that a hypervisor that goes away once does not either.
//
// # Why large memories are there before they are used
//
// The first use of a huge page takes a tenth of a millisecond, for the price of a store. A guest that visits 4 GiB page by
// page would take 0.2 s for 40,000 units. So the pages of a memory of 8 MiB and more are asked for when kv_init has returned, which nobody
// waits for. What a policy's tables will take is taken from the start.
//
// # Why the original is compiled before it is rewritten
//
// What the meter adds has an index that a module could name beforehand. Such a module is not valid by itself, and would
// be afterwards. The interpreter's compiler is the validator, because it takes a tenth of the other's time.
//
// # How much fuel
//
// A call gets so much, and so much per record on top: see fuel.go. Measured with the first-party policies, all in Go, on
// roots that are made to be hard: 256 events take lru 0.3 million at most, naming 1,024 victims among 100,000 entries takes
// the others up to 1.5 million, and an event of wtinylfu 5,000. Go guests use several units where C uses one, because their
// functions are one big switch that is charged in coarse steps. A module that needs more than the default says so in its
// manifest, up to 6 million for a call, and gets fewer events in each when they are dear; beyond that the operator must.
//
// # Why a module is tried out when it is loaded
//
// A module that cannot do its job is best refused when the operator looks on, with a reason, and not by its first fault.
// The canary (canary.go) has an instance of each role do a little of everything; it costs about two starts of an instance.
// That it was passed is kept with the compiled form (tried.go), under the module, the host and the limits that it depends on.
//
// # Why a signature stands beside the module
//
// A section inside would have to be left out of what is signed, and no tool would check it. The tool minisign signs any
// file, and puts <file>.minisig beside it. The trusted comment holds the SHA-256 of what was signed, so that a refusal can
// name both digests.
//
// # Why a state is tried on an instance that can be thrown away
//
// It may come from another module, or be damaged. A guest that traps over it has done nothing wrong yet: it is dropped with
// the state, another one starts empty, and is told what is resident.
//
// # Why an instance dies of its first fault
//
// wazero would let a trapped guest be called again. Its state is then one that its author never thought of. Starting
// anew costs milliseconds, and what it knew is replayed.
//
// # Why _initialize is called by hand
//
// wazero runs start functions while it instantiates. A module's first code is guest code like any other and goes through
// the same call; a start section, which cannot be held back, is refused.
//
// # Why sections are read before the module is compiled
//
// Compiling a Go guest takes half a second; finding out that it has no marker should not. The scan also knows what to
// tell an author ("build with -buildmode=c-shared"), which a validator does not.
//
// # Why the WASI stub needs no word from the operator
//
// Every Go guest imports ten of its functions before it does anything. The stub has no files, no arguments, no
// environment, a clock that only counts its readings and seeded random numbers: there is nothing to allow. The manifest
// must still ask, so that it shows.
//
// # Why guest memory is mapped
//
// A reservation of the module's largest size, made accessible as it grows: an instance starts ten times faster than on
// the Go heap, growing never copies, and closing returns the pages at once. Its address space costs nothing, so that
// modules for 10^8 slots may have their limit at 4 GiB.
//
// # Why Place has a pool
//
// Naming is on the path of every store and load, from many goroutines, and a path is a pure function: any instance can
// answer. Evict has state and its root's lock around it; admit and layout are rare enough to take turns.
//
// # Why Identity asks twice
//
// A directory may hold anything. An inverse that is wrong would make the host serve one key's bytes for another's, so a
// path counts as known only when the policy gives the same path back for what it read.
package policy
