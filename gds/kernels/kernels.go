// Package kernels holds the GPU code as PTX, which every driver compiles for its own GPU.
package kernels

import _ "embed"

// Pages is the PTX of pages.cu, and Sums that of sums.cu. generate.sh makes them.
var (
	//go:embed pages.ptx
	Pages string
	//go:embed sums.ptx
	Sums string
)

// The kernels' names.
const (
	PagesEntry = "kvhost_pages"
	SumsEntry  = "kvhost_sums"
)

// Sizes of the kernels' thread blocks, as in the sources.
const (
	PagesThreads = 512
	SumsThreads  = 256
)

// SumsExtent is the longest extent that is summed.
const SumsExtent = 64 << 10

// XXH3 is the header that the checksum kernel shares with the double of the driver.
//
//go:embed xxh3.h
var XXH3 string
