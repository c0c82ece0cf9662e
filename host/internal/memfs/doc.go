// Package memfs is a [staging.FS] with files in page-locked memory of this process, so that GPUs gather into them and
// scatter from them. Its files are [staging.MemoryFile]s. They are gone with the process.
//
// The memory is mapped near the GPUs in steps of 64 MiB to 1 GiB, in huge pages if the machine has them. The first step
// is available at once. A goroutine maps and page-locks the others, and a write that needs more memory waits for it.
// The last steps are left out if the machine has no memory for them.
//
// A file's bytes are extents: runs of 4 KiB pages within one step. An extent is taken from the smallest free run that
// is large enough, and free runs that touch are merged. If no run is large enough, a file gets the largest ones, so it
// has as few extents as the free runs permit. No page is ever lost to fragmentation: an allocation succeeds exactly if
// enough pages are free. Files of equal sizes leave runs of that size, which later files reuse. Files of mixed sizes
// from 1 to 32 MiB, which replace each other at random in a file system that is full up to [Usable], mostly have one or
// two extents. 99 of 100 have at most eight, regardless of the running time (TestFragmentation).
//
// As on other file systems, a file keeps its memory while a name or an open [staging.File] refers to it. Thus memory is
// not reused while a copy into it or out of it is under way, even if the file is removed at the same time.
package memfs
