package drive

import (
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// Heads describes the layout of an engine's pages, so that they can be stored as units, which engines of other tensor-parallel sizes load.
// Without Units pages are stored unchanged.
type Heads struct {
	Units  int  // number of units, each of one KV head; every page has all of them
	Parts  int  // parts of a page, K before V
	Tokens int  // tokens of a page
	First  bool // heads are the outer dimension, and tokens the inner one
}

// Geometry returns the geometry of a unit's chunk. Its pages are tokens.
func (h Heads) Geometry(pages kv.Geometry) kv.Geometry {
	if h.Units == 0 {
		return pages
	}
	g := kv.Geometry{Blocks: pages.Blocks * uint32(h.Tokens)}
	for _, p := range pages.Planes {
		for part := range h.Parts {
			g.Planes = append(g.Planes, kv.Plane{Layer: p.Layer, Part: p.Part*uint32(h.Parts) + uint32(part),
				PageBytes: p.PageBytes / uint32(h.Parts*h.Units*h.Tokens)})
		}
	}
	return g
}

// Regions returns the places of the units' tokens, and for each the index of the engine's plane that contains it. at holds the
// places of the engine's pages.
func (h Heads) Regions(pages kv.Geometry, at []client.PlaneRegion) (list []client.PlaneRegion, planes []int) {
	if h.Units == 0 {
		for i := range at {
			planes = append(planes, i)
		}
		return at, planes
	}
	for unit := range h.Units {
		for i, r := range at {
			part := int64(pages.Planes[i].PageBytes) / int64(h.Parts)
			token := part / int64(h.Units*h.Tokens)
			for n := range h.Parts {
				of := r
				of.Pages, of.PageStride = uint32(h.Tokens), token
				of.Offset += int64(n)*part + int64(unit)*token*int64(h.Tokens)
				if !h.First {
					of.Offset, of.PageStride = r.Offset+int64(n)*part+int64(unit)*token, token*int64(h.Units)
				}
				list, planes = append(list, of), append(planes, i)
			}
		}
	}
	return list, planes
}
