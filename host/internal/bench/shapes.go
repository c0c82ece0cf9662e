package bench

import (
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/kv"
)

// Shape is a geometry that can be measured.
type Shape struct {
	Name, Title string
	DType       string // type of its values, one of package payload's
	Geometry    kv.Geometry
	Heads       drive.Heads // layout of a page, for storing it in units; without units, pages are stored whole
}

// Shapes are geometries of real models, with chunks of 32, 17 and 16 MiB.
var Shapes = [...]Shape{
	{"llama", "Llama-3.1-8B, 32 x 64 KiB pages", payload.BFloat16, kv.Uniform(16, 32, 1, 64<<10), drive.Heads{}},
	{"mla", "MLA, 61 x 18,432 B pages", payload.BFloat16, kv.Uniform(16, 61, 1, 18432), drive.Heads{}},
	{"fp8", "Llama-3.1-8B, 32 x 32 KiB pages", payload.FP8, kv.Uniform(16, 32, 1, 32<<10), drive.Heads{}},
	{"heads", "Llama-3.1-8B for all sizes, heads outside tokens", payload.BFloat16, kv.Uniform(16, 32, 1, 64<<10),
		drive.Heads{Units: 8, Parts: 2, Tokens: 16, First: true}},
	{"tokens", "Llama-3.1-8B for all sizes, tokens outside heads", payload.BFloat16, kv.Uniform(16, 32, 1, 64<<10),
		drive.Heads{Units: 8, Parts: 2, Tokens: 16}},
}

// MaxFile is an upper bound for the file of a chunk of these shapes.
const MaxFile = 40 << 20
