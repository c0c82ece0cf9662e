package server

import (
	"math"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// onDevice reports whether a region is in a GPU's memory, and names its field.
func onDevice(i int, m *proto.Region) (field string, ok bool) {
	if _, ok := m.GetHandle().(*proto.Region_CudaIpc); ok {
		return at("regions", i, "cuda_ipc"), true
	}
	return at("regions", i, "handle"), false
}

// mapRegions maps the memory of a REGISTER. r holds what was mapped, even when it fails.
func (c *clientMemory) mapRegions(
	g *kv.Group, regions []*proto.Region, files descriptors, r *registration,
) (transfer.Memory, error) {
	planes := g.Geometry.Planes
	if len(regions) != len(planes) {
		return nil, invalid("regions", "%d, group %d has %d planes", len(regions), g.ID, len(planes))
	}
	if _, device := onDevice(0, regions[0]); device {
		return c.importRegions(g, regions, r)
	}
	byTag := map[uint64]*mapping{}
	out := make([]transfer.HostRegion, len(planes))
	for i, m := range regions {
		if err := checkPlane(i, m, g, func(p uint32) bool { return out[p].Data != nil }); err != nil {
			return nil, err
		}
		if _, ok := m.GetHandle().(*proto.Region_Memfd); !ok {
			return nil, invalid(at("regions", i, "handle"), "not host memory (memfd), as regions[0] is")
		}
		tag := m.GetMemfd()
		if files[tag] == nil {
			return nil, faultf(proto.Code_CODE_UNKNOWN, at("regions", i, "memfd"), "no descriptor came under tag %d",
				tag)
		}
		a := byTag[tag]
		if a == nil {
			var err error
			if a, err = c.mapFile(files[tag]); err != nil {
				return nil, err
			}
			byTag[tag] = a
			r.maps = append(r.maps, a)
		}
		if err := checkRegion(i, m, planes[m.GetPlane()].PageBytes, a.file.Size); err != nil {
			return nil, err
		}
		if m.GetBlocks() != regions[0].GetBlocks() {
			return nil, invalid(at("regions", i, "blocks"), "%d, regions[0] has %d", m.GetBlocks(),
				regions[0].GetBlocks())
		}
		out[m.GetPlane()] = transfer.HostRegion{
			Data: a.data, Offset: int64(m.GetOffset()), Stride: int64(m.GetStride()), Blocks: m.GetBlocks(),
		}
	}
	mem, err := transfer.NewHostMemory(g.Geometry, out)
	if err != nil {
		return nil, invalid("regions", "%v", err)
	}
	return mem, nil
}

// importRegions imports the allocations of a REGISTER, each once.
func (c *clientMemory) importRegions(
	g *kv.Group, regions []*proto.Region, r *registration,
) (transfer.Memory, error) {
	planes := g.Geometry.Planes
	known := map[string]*gds.Import{}
	out := make([]transfer.DeviceRegion, len(planes))
	for i, m := range regions {
		field, ok := onDevice(i, m)
		switch {
		case !ok:
			return nil, invalid(field, "host memory, regions[0] is a GPU's")
		case c.gpu == nil:
			return nil, c.noGPU(field)
		}
		if err := checkPlane(i, m, g, func(p uint32) bool { return out[p].Blocks != 0 }); err != nil {
			return nil, err
		}
		mem, err := c.importHandle(field, m.GetCudaIpc(), known, r)
		if err != nil {
			return nil, err
		}
		if err := checkRegion(i, m, planes[m.GetPlane()].PageBytes, mem.Size); err != nil {
			return nil, err
		}
		if m.GetBlocks() != regions[0].GetBlocks() {
			return nil, invalid(at("regions", i, "blocks"), "%d, regions[0] has %d", m.GetBlocks(),
				regions[0].GetBlocks())
		}
		out[m.GetPlane()] = transfer.DeviceRegion{
			Base: mem.Base, Bytes: mem.Size, Offset: int64(m.GetOffset()), Stride: int64(m.GetStride()),
			Blocks: m.GetBlocks(),
		}
	}
	mem, err := transfer.NewDeviceMemory(c.gpu, g.Geometry, out)
	if err != nil {
		return nil, invalid("regions", "%v", err)
	}
	return mem, nil
}

// checkPlane checks that a region names a plane of the group, and is the first of that plane.
func checkPlane(i int, m *proto.Region, g *kv.Group, taken func(uint32) bool) error {
	switch planes := len(g.Geometry.Planes); {
	case uint64(m.GetPlane()) >= uint64(planes):
		return invalid(at("regions", i, "plane"), "%d, group %d has %d planes", m.GetPlane(), g.ID, planes)
	case taken(m.GetPlane()):
		return invalid(at("regions", i, "plane"), "%d twice", m.GetPlane())
	}
	return nil
}

// checkRegion checks that every page lies within the file or allocation, without overflow for any input.
func checkRegion(i int, m *proto.Region, page uint32, size int64) error {
	switch {
	case m.GetBlocks() == 0 || m.GetBlocks() == math.MaxUint32:
		return invalid(at("regions", i, "blocks"), "%d", m.GetBlocks())
	case m.GetStride() < uint64(page):
		return invalid(at("regions", i, "stride"), "%d, the plane's pages have %d bytes", m.GetStride(), page)
	case m.GetStride() > uint64(size):
		return invalid(at("regions", i, "stride"), "%d, its memory has %d bytes", m.GetStride(), size)
	case m.GetOffset() > uint64(size):
		return invalid(at("regions", i, "offset"), "%d, its memory has %d bytes", m.GetOffset(), size)
	}
	// blocks < 2^32 and stride <= size < 2^63: divide instead of multiplying.
	left := uint64(size) - m.GetOffset()
	if left < uint64(page) || (left-uint64(page))/m.GetStride() < uint64(m.GetBlocks()-1) {
		return invalid(at("regions", i, "blocks"),
			"%d of stride %d from offset %d do not lie within its memory's %d bytes",
			m.GetBlocks(), m.GetStride(), m.GetOffset(), size)
	}
	return nil
}
