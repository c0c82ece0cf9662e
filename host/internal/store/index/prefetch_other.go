//go:build (!amd64 && !arm64) || purego

package index

import "unsafe"

// prefetchLines does nothing on other processors.
func prefetchLines(*[PrefetchStep]unsafe.Pointer, uintptr) {}
