package server

import (
	"errors"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// register maps the memory that a REGISTER names. It takes the descriptors that the message names, even if it fails.
func (c *clientMemory) register(ns *kv.Namespace, units int, m *proto.Register) error {
	files := c.takeDescriptors(m.GetRegions())
	defer files.close()
	group, err := groupOf(ns, m.GetGroup())
	if err != nil {
		return err
	}
	if r := c.regs[group.ID]; r != nil {
		return faultf(proto.Code_CODE_BUSY, "group", "%d is registered already", group.ID)
	}
	r := &registration{group: group, units: units}
	if err := c.share.Take(budget.Regions, int64(len(m.GetRegions()))); err != nil {
		return err
	}
	r.tables = len(m.GetRegions())
	if r.memory, err = c.mapRegions(group, m.GetRegions(), files, r); err != nil {
		c.unmap(r)
		return err
	}
	c.regs[group.ID] = r
	return nil
}

// onDevice reports whether a region is in the memory of a GPU, and returns the name of its handle field.
func onDevice(i int, m *proto.Region) (field string, ok bool) {
	if _, ok := m.GetHandle().(*proto.Region_CudaIpc); ok {
		return at("regions", i, "cuda_ipc"), true
	}
	return at("regions", i, "handle"), false
}

// mapRegions maps the memory of a REGISTER, each file or allocation once. Mapped memory is added to r even if mapRegions fails.
func (c *clientMemory) mapRegions(g *kv.Group, regions []*proto.Region, files descriptors, r *registration) (transfer.Memory, error) {
	planes := g.Geometry.Planes
	if len(regions) != r.units*len(planes) {
		return nil, invalid("regions", "%d, group %d has %d planes, and the rank %d units", len(regions), g.ID, len(planes), r.units)
	}
	_, device := onDevice(0, regions[0])
	byTag, known := map[uint64]*mapping{}, map[string]*gds.Import{}
	host, onGPU := make([]transfer.HostRegion, len(regions)), make([]transfer.DeviceRegion, len(regions))
	number := make([]int, len(regions)) // 1 + the index of a region, by unit and plane
	for i, m := range regions {
		if err := c.checkKind(i, m, device); err != nil {
			return nil, err
		}
		place, err := checkPlane(i, m, g, number)
		if err != nil {
			return nil, err
		}
		grid := transfer.Grid{Offset: int64(m.GetOffset()), Stride: int64(m.GetStride()), Blocks: m.GetBlocks(), Pages: m.GetPages(),
			PageStride: int64(m.GetPageStride())}
		if device {
			mem, err := c.importHandle(at("regions", i, "cuda_ipc"), m.GetCudaIpc(), known, r)
			if err != nil {
				return nil, err
			}
			onGPU[place] = transfer.DeviceRegion{Base: mem.Base, Bytes: mem.Size, Grid: grid}
			continue
		}
		a, err := c.mapTag(i, m.GetMemfd(), byTag, files, r)
		if err != nil {
			return nil, err
		}
		host[place] = transfer.HostRegion{Data: a.data, Grid: grid}
	}
	var mem transfer.Memory
	var err error
	if device {
		mem, err = transfer.NewDeviceMemory(c.gpu, g.Geometry, onGPU)
	} else {
		mem, err = transfer.NewHostMemory(g.Geometry, host)
	}
	if bad, ok := errors.AsType[*transfer.RegionError](err); ok {
		return nil, invalid(at("regions", number[bad.Region]-1, bad.Field), "%s", bad.Reason)
	}
	if err != nil {
		return nil, invalid("regions", "%v", err)
	}
	return mem, nil
}

// checkKind checks that a region is the same kind of memory as the first region.
func (c *clientMemory) checkKind(i int, m *proto.Region, device bool) error {
	field, is := onDevice(i, m)
	_, memfd := m.GetHandle().(*proto.Region_Memfd)
	switch {
	case device && !is:
		return invalid(field, "host memory, regions[0] is a GPU's")
	case device && c.gpu == nil:
		return c.noGPU(field)
	case !device && !memfd:
		return invalid(at("regions", i, "handle"), "not host memory (memfd), as regions[0] is")
	}
	return nil
}

// mapTag returns the mapping of the file with a tag. If byTag does not have it, mapTag maps the file and adds it to byTag and
// to r.
func (c *clientMemory) mapTag(i int, tag uint64, byTag map[uint64]*mapping, files descriptors, r *registration) (*mapping, error) {
	if files[tag] == nil {
		return nil, faultf(proto.Code_CODE_UNKNOWN, at("regions", i, "memfd"), "no descriptor came under tag %d", tag)
	}
	if a := byTag[tag]; a != nil {
		return a, nil
	}
	a, err := c.mapFile(files[tag])
	if err == nil {
		byTag[tag] = a
		r.maps = append(r.maps, a)
	}
	return a, err
}

// checkPlane checks that a region names a plane of the group and a unit of the rank, and that no earlier region names the same
// pair. It returns the index of the pair, and records the region's number.
func checkPlane(i int, m *proto.Region, g *kv.Group, number []int) (place int, err error) {
	planes := len(g.Geometry.Planes)
	if uint64(m.GetPlane()) >= uint64(planes) {
		return 0, invalid(at("regions", i, "plane"), "%d, group %d has %d planes", m.GetPlane(), g.ID, planes)
	}
	if units := len(number) / planes; uint64(m.GetUnit()) >= uint64(units) {
		return 0, invalid(at("regions", i, "unit"), "%d, the rank has %d units", m.GetUnit(), units)
	}
	if place = int(m.GetUnit())*planes + int(m.GetPlane()); number[place] != 0 {
		return 0, invalid(at("regions", i, "plane"), "%d twice", m.GetPlane())
	}
	number[place] = i + 1
	return place, nil
}
