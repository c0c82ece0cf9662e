// Package kernels holds the GPU code as PTX, which every driver compiles for its own GPU.
package kernels

import _ "embed"

// Pages is the PTX of pages.cu, Sums that of sums.cu, and Codec that of codec.cu. generate.sh makes them.
var (
	//go:embed pages.ptx
	Pages string
	//go:embed sums.ptx
	Sums string
	//go:embed codec.ptx
	Codec string
)

// The kernels' names.
const (
	PagesEntry = "kvhost_pages"
	SumsEntry  = "kvhost_sums"

	EncodeEntry = "kvhost_encode"
	PackEntry   = "kvhost_pack"
	DecodeEntry = "kvhost_decode"
	JoinEntry   = "kvhost_join"
)

// Sizes of the kernels' thread blocks, as in the sources.
const (
	PagesThreads = 512
	SumsThreads  = 256

	EncodeThreads = 256
	PackThreads   = 256
	DecodeThreads = 32
	JoinThreads   = 256
)

// SumsExtent is the longest extent that is summed.
const SumsExtent = 64 << 10

// XXH3 and Huffman are the headers that the kernels of checksums and of the codec share with the double of the driver.
var (
	//go:embed xxh3.h
	XXH3 string
	//go:embed huffman.h
	Huffman string
)
