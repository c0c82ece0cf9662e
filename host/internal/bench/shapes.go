package bench

import (
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/kv"
)

// Shape is a geometry that can be measured.
type Shape struct {
	Name, Title string
	DType       string // of its values, one of package payload's
	Geometry    kv.Geometry
}

// Shapes are those of models: chunks of 32, 17 and 16 MiB.
var Shapes = [...]Shape{
	{"llama", "Llama-3.1-8B, 32 x 64 KiB pages", payload.BFloat16, kv.Uniform(16, 32, 1, 64<<10)},
	{"mla", "MLA, 61 x 18,432 B pages", payload.BFloat16, kv.Uniform(16, 61, 1, 18432)},
	{"fp8", "Llama-3.1-8B, 32 x 32 KiB pages", payload.FP8, kv.Uniform(16, 32, 1, 32<<10)},
}

// MaxFile is more than the file of a chunk of any of them takes.
const MaxFile = 40 << 20
