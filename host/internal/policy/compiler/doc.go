// Package compiler validates, meters and compiles WebAssembly modules in a child process, so that a module that is made
// to exhaust a compiler costs a process and not the host.
//
// # Why a process
//
// A module of 700 kB can make a compiler use 17 GiB, or run for minutes, and no limit on sizes and counts tells it from
// an honest one. A goroutine cannot be stopped, and its memory cannot be limited. A process can be killed.
//
// # The same binary
//
// The child is this executable, started again with another name as its first argument ([processName]). The package's
// init recognizes the name and compiles instead of running the program, so that every program that links the package,
// tests and embedders included, can compile without a line of its own.
//
// # What the child may do
//
// It limits itself before it reads the module: memory by RLIMIT_DATA, processor time by RLIMIT_CPU, file sizes by
// RLIMIT_FSIZE, no core dumps. It asks to be the first that the kernel kills when memory is short. The parent limits
// the elapsed time, and kills the child when the context ends. The child ends when the parent does.
//
// # How the result travels
//
// Through a directory that the parent makes for this one compilation: the metered module, and wazero's cache file with
// the machine code. The parent loads that file and never compiles: [WithoutCompiling]. The load repeats the validation
// in the parent, which a module can make slow too. So the child rehearses the load and refuses a module that costs too
// much.
package compiler
