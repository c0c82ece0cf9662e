//go:build !amd64 && !arm64

package store

import "unsafe"

// fetch does nothing where Go's assembler is not asked: lookups wait for memory then.
func fetch(*[step]unsafe.Pointer, uintptr) {}
