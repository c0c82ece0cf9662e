// Package export is the part of a Go guest that its roles share: what the host calls whatever the roles are, and the
// buffers that the host reads and writes, 16-aligned, allocated when the host asks for them and never moved afterwards. A
// batch is read in place, because a record's memory layout is its wire layout.
package export
