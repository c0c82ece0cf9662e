package config

import (
	"strings"

	"github.com/kvhost/kvhost/host/internal/s3fs"
)

// RootKind is what holds a root's pieces. It says what follows from that, so that who asks need not know the kinds.
type RootKind int

const (
	// Directory is a directory of the operating system.
	Directory RootKind = iota
	// Memory is page-locked memory of the host, gone with it.
	Memory
	// Bucket is the objects below a prefix of a bucket.
	Bucket
)

// MemoryPrefix begins the path of a root in page-locked memory: "memory:", or "memory:name" where there are several. A
// directory of such a name can be written as "./memory:".
const MemoryPrefix = "memory:"

// Kind is what the root's path names.
func (r Root) Kind() RootKind {
	switch {
	case strings.HasPrefix(r.Path, MemoryPrefix):
		return Memory
	case strings.HasPrefix(r.Path, s3fs.Scheme):
		return Bucket
	}
	return Directory
}

// HasDirectory says that the root has a file system that others may use too: it is found by its absolute path, can be
// measured, mounted and shared, holds directories beside pieces, and its files have descriptors.
func (k RootKind) HasDirectory() bool { return k == Directory }

// TakesMemory says that the root's capacity is memory of this machine, and the same as long as the host runs.
func (k RootKind) TakesMemory() bool { return k == Memory }

func (r Root) takesMemory() bool { return r.Kind().TakesMemory() }

func (k RootKind) String() string { return [...]string{"a directory", "memory", "a bucket"}[k] }
