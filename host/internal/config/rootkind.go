package config

import (
	"strings"

	"github.com/kvhost/kvhost/host/internal/s3fs"
)

// RootKind is the kind of place that holds a root's pieces. Its methods are the properties that follow from the kind.
type RootKind int

const (
	// Directory is a directory of the operating system.
	Directory RootKind = iota
	// Memory is page-locked memory of the host. Its content is lost when the host stops.
	Memory
	// Bucket is a prefix of a bucket, whose objects are the pieces.
	Bucket
)

// MemoryPrefix begins the path of a root in page-locked memory: "memory:", or "memory:name" if there are several. A
// directory with such a name can be written as "./memory:".
const MemoryPrefix = "memory:"

// Kind returns the kind of place that the root's path names.
func (r Root) Kind() RootKind {
	switch {
	case strings.HasPrefix(r.Path, MemoryPrefix):
		return Memory
	case strings.HasPrefix(r.Path, s3fs.Scheme):
		return Bucket
	}
	return Directory
}

// HasDirectory reports whether the root is a directory of the operating system, which other programs may use as well.
// Such a root has an absolute path. It can be measured and mounted, contains directories in addition to pieces, and its
// files have descriptors.
func (k RootKind) HasDirectory() bool { return k == Directory }

// TakesMemory reports whether the root's capacity is memory of this machine, which does not change while the host runs.
func (k RootKind) TakesMemory() bool { return k == Memory }

func (r Root) takesMemory() bool { return r.Kind().TakesMemory() }

func (k RootKind) String() string { return [...]string{"a directory", "memory", "a bucket"}[k] }
