// Package kernels holds the GPU code as PTX, which every driver compiles for its own GPU.
package kernels

import _ "embed"

// Pages is the PTX of pages.cu. generate.sh makes it.
//
//go:embed pages.ptx
var Pages string

// Threads is the size of the kernel's thread blocks, as in the source.
const Threads = 512

// Entry is the kernel's name.
const Entry = "kvhost_pages"
