// Package export is the part of a Go guest that all roles share: the functions that the host calls for any role, and the
// buffers that the host reads and writes. Buffers are aligned to 16 bytes, are allocated when the host asks for them, and never
// move afterwards. A batch is read in place, because a record's memory layout is its wire layout.
package export
