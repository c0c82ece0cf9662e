package kv

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Plane is one stream of pages of a group: the K of a layer, its V, or both if the engine keeps them in one page.
type Plane struct {
	Layer     uint32
	Part      uint32 // 0 for K or a fused page, 1 for V, higher numbers for auxiliary caches
	PageBytes uint32
}

// Geometry is the shape of one rank's chunk: a number of blocks, each with one page in every plane.
type Geometry struct {
	Blocks uint32
	Planes []Plane
}

// Limits of a geometry. A chunk larger than MaxPayload is refused, so that files have a size that suits I/O.
const (
	MaxBlocks  = 4096
	MaxPlanes  = 4096
	MaxPayload = 1 << 30
)

// Validate returns an error if the geometry is not valid.
func (g *Geometry) Validate() error {
	if g.Blocks == 0 || g.Blocks > MaxBlocks {
		return fmt.Errorf("%w: %d blocks per chunk, want 1 to %d", ErrGeometry, g.Blocks, MaxBlocks)
	}
	if len(g.Planes) == 0 || len(g.Planes) > MaxPlanes {
		return fmt.Errorf("%w: %d planes, want 1 to %d", ErrGeometry, len(g.Planes), MaxPlanes)
	}
	seen := make(map[[2]uint32]bool, len(g.Planes))
	for i, p := range g.Planes {
		if p.PageBytes == 0 {
			return fmt.Errorf("%w: plane %d has empty pages", ErrGeometry, i)
		}
		if seen[[2]uint32{p.Layer, p.Part}] {
			return fmt.Errorf("%w: layer %d part %d twice", ErrGeometry, p.Layer, p.Part)
		}
		seen[[2]uint32{p.Layer, p.Part}] = true
	}
	if n := g.payload(); n > MaxPayload {
		return fmt.Errorf("%w: %d bytes per chunk and rank, at most %d", ErrGeometry, n, MaxPayload)
	}
	return nil
}

func (g *Geometry) payload() uint64 {
	var n uint64
	for _, p := range g.Planes {
		n += uint64(p.PageBytes)
	}
	return n * uint64(g.Blocks)
}

// Equal reports whether two geometries have the same planes and blocks, by which chunks are indexed.
func (g Geometry) Equal(o Geometry) bool {
	return g.Blocks == o.Blocks && slices.Equal(g.Planes, o.Planes)
}

// PageBytes returns the sum of all page bytes of one rank's chunk, without gaps.
func (g *Geometry) PageBytes() int64 { return int64(g.payload()) }

// Uniform returns a geometry with the given number of layers, each with the given number of parts, and pages of pageBytes.
func Uniform(blocks, layers, parts, pageBytes uint32) Geometry {
	g := Geometry{Blocks: blocks}
	for l := range layers {
		for p := range parts {
			g.Planes = append(g.Planes, Plane{Layer: l, Part: p, PageBytes: pageBytes})
		}
	}
	return g
}

// text returns the canonical form "blocks=16 planes=0.0:65536,0.1:65536,...", which lists every plane.
func (g *Geometry) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "blocks=%d planes=", g.Blocks)
	for i, p := range g.Planes {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%d.%d:%d", p.Layer, p.Part, p.PageBytes)
	}
	return b.String()
}

// parse is the inverse of text for canonical text.
func (g *Geometry) parse(text string) error {
	if len(text) > maxGeometryText {
		return fmt.Errorf("%w: %d bytes of text", ErrGeometry, len(text))
	}
	blocks, planes, _ := strings.Cut(strings.TrimPrefix(text, "blocks="), " planes=")
	n, err := strconv.ParseUint(blocks, 10, 32)
	if err != nil {
		return err
	}
	g.Blocks = uint32(n)
	for plane := range strings.SplitSeq(planes, ",") {
		layer, rest, _ := strings.Cut(plane, ".")
		part, bytes, _ := strings.Cut(rest, ":")
		var of [3]uint64
		for i, number := range [...]string{layer, part, bytes} {
			if of[i], err = strconv.ParseUint(number, 10, 32); err != nil {
				return err
			}
		}
		g.Planes = append(g.Planes, Plane{Layer: uint32(of[0]), Part: uint32(of[1]), PageBytes: uint32(of[2])})
	}
	return nil
}

// maxGeometryText is the maximum length of the text of a geometry: the most planes, and numbers with the most digits.
const maxGeometryText = 64 + MaxPlanes*3*11
