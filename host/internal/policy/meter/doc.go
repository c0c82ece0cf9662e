// Package meter reads a WebAssembly module, and rewrites it so that it counts its executed instructions.
//
// Every instruction of a function runs at most once per entry into the innermost region that holds it, where a region
// is the function's body or the body of one of its loops. So if each function entry and each loop header subtracts the
// cost of its region's instructions from a counter, no run can execute more than the counter had, whatever the control
// flow: branches can only skip paid instructions. An instruction costs one unit, or more if it may take longer: loads
// and divisions 8, stores and float arithmetic 4, calls 24, ref.func (a call into the host) 150, memory.grow 500.
// Operations with a cost that grows with an operand (memory.fill, memory.copy, memory.init, memory.grow and the table
// operations) also pay by length, a unit for 8 bytes or for an element. The benchmark of package sandbox compares the
// time of instructions with their units.
//
// The host must get control now and then, because it cannot interrupt a guest. So a long stretch of code without a loop
// pays in parts (plan.go), large copies and fills are done in slices (bulk.go), and functions with large frames pay for
// the stack that they need (frame.go).
//
// A loop that is one big switch is cut into finer regions: see dispatch in plan.go. The rest of that file reduces the
// number of charges, because a charge costs about a nanosecond. If such a switch implements jumps, straighten.go gives
// the function a second, faster form, which saves more than the charges cost.
//
// The counter is one mutable i64 global, appended and exported as [Global]. The host sets it before a call. A function
// that finds it below zero calls the appended function [Refuel], which traps with "unreachable" unless the host, which
// can listen to it, has raised the counter. So a guest can get its fuel in slices, and the host gets control in
// between. Not every charge is followed by a check (plan.go says which), so a call can return with the counter below
// zero. It has then overspent, which the host checks.
//
// A module cannot cheat. It could try the following:
//
//   - name the global before it exists: this fails, because the caller must compile the original bytes first;
//   - export a reserved name: such a module is refused;
//   - run code at instantiation: a module with a start section is refused;
//   - use an instruction that is not counted: a module with an unknown opcode is refused;
//   - hide work in one instruction: bulk operations pay by length, and zeroing a function's locals is part of its entry.
//
// Function indexes do not change, so names in traces remain right. Custom sections are kept.
package meter
