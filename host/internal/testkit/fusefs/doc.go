// Package fusefs is a test double of a file system that misbehaves, below the kernel: it mounts a directory again by FUSE and
// injects faults into what the kernel asks for. Everything that uses the mount is real: system calls, direct I/O, other
// processes. The rules are those of [faultfs]; two of its words mean more here, since the caller is a kernel: a short read or
// write succeeds with fewer bytes, and "direct" is an open with O_DIRECT.
//
// The file system is served by a process of its own, which the one that mounts it starts. It unmounts when that one ends,
// however it ends.
package fusefs
