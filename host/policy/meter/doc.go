// Package meter makes a WebAssembly module pay for what it executes, by rewriting it at load.
//
// The one idea: every instruction of a function runs at most once per entry into the innermost region that holds it,
// where a region is the function's body or the body of one of its loops. So if each function entry and each loop header
// takes from a counter what its region's instructions cost, no run can execute more than the counter had, whatever the
// control flow: branches can only skip what was paid for. An instruction costs one unit, or more where it may take
// longer: loads and divisions 8, stores 4, calls 24 (they nest, and a stack grows by copying), memory.grow 500.
// Operations whose cost grows with an operand (memory.fill, memory.copy, memory.init, memory.grow and their table
// twins) pay by length besides, a unit for 8 bytes or for an element.
//
// A loop that is one big switch is cut into finer regions: see dispatch in plan.go. The rest of that file is about
// charging seldom, because a charge costs about a nanosecond. What charging costs is more than paid back where such a
// switch stands for jumps: see straighten.go, which gives such functions a second form that runs faster.
//
// The counter is one mutable i64 global, appended and exported as [Global]. The host sets it before a call. Where a
// function finds it below zero it calls another one that is appended, [Refuel], which traps with "unreachable" unless
// the host, who can listen to it, has raised the counter: so a guest may get its fuel in slices, and the host a word in
// between. Not every charge is followed by a look (plan.go says when), so that a call can return with the counter below
// zero; it has then spent more than it had, which is for the host to see.
//
// What a module can do to cheat, and why it cannot:
//
//   - name the global before it exists: the caller must compile the original bytes first, which fails;
//   - export a reserved name: refused;
//   - run code at instantiation: a start section is refused;
//   - use an instruction that is not counted: any opcode the rewriter does not know is refused by its number;
//   - hide work in one instruction: bulk operations pay by length, zeroing a function's locals is part of its entry.
//
// Function indexes do not move, so names in traces stay right. Custom sections are kept; debug sections hold offsets
// into the old code and are dropped.
package meter
