package server

import (
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/transfer"
)

// mapping is one client file mapped here, once however many regions and groups it serves.
type mapping struct {
	file  fileID
	data  []byte
	users int // registrations
}

// fileID tells files apart. A file that has grown is mapped anew.
type fileID struct {
	dev, ino uint64
	size     int64
}

// checkArena says what a descriptor is, and refuses what could fault under this process: a file that can shrink.
func checkArena(f *os.File) (fileID, error) {
	fd := int(f.Fd())
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fileID{}, invalid("memfd", "the descriptor is no memfd: it has no seals (%v)", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return fileID{}, invalid("memfd", "the memfd is not sealed against shrinking (F_SEAL_SHRINK)")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fileID{}, invalid("memfd", "fstat: %v", err)
	}
	if st.Size <= 0 {
		return fileID{}, invalid("memfd", "the memfd is empty")
	}
	return fileID{uint64(st.Dev), st.Ino, st.Size}, nil
}

// mapArena maps a descriptor for this session, or finds its mapping, and counts one user.
func (x *session) mapArena(f *os.File) (*mapping, error) {
	id, err := checkArena(f)
	if err != nil {
		return nil, err
	}
	if m := x.maps[id]; m != nil {
		m.users++
		return m, nil
	}
	limits := &x.server.cfg.Limits
	if x.mapped+id.size > limits.SessionArena {
		return nil, faultf(proto.Code_CODE_LIMIT, "memfd", "%d bytes more, the session has %d mapped of at most %d", id.size, x.mapped, limits.SessionArena)
	}
	if total := x.server.mapped.Add(id.size); total > limits.ArenaBytes {
		x.server.mapped.Add(-id.size)
		return nil, faultf(proto.Code_CODE_LIMIT, "memfd", "%d bytes more, all sessions have %d mapped of at most %d", id.size, total-id.size, limits.ArenaBytes)
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(id.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		x.server.mapped.Add(-id.size)
		return nil, invalid("memfd", "cannot be mapped for reading and writing: %v", err)
	}
	m := &mapping{file: id, data: data, users: 1}
	x.maps[id] = m
	x.mapped += id.size
	return m, nil
}

// unmapArena takes one user off and unmaps with the last. Nothing may be able to touch the bytes any more.
func (x *session) unmapArena(m *mapping) {
	if m.users--; m.users > 0 {
		return
	}
	delete(x.maps, m.file)
	x.mapped -= m.file.size
	x.server.mapped.Add(-m.file.size)
	if err := unix.Munmap(m.data); err != nil {
		x.log.Error("munmap", "error", err)
	}
	m.data = nil
}

// registration is a group's pages in a session. Its fields are settled before it is in the session's table.
type registration struct {
	group   *chunk.Group
	memory  transfer.Memory
	maps    []*mapping
	imports []*gds.Import // of a GPU's memory
	closing bool
	use     use
}

// descriptors are what a REGISTER has used up, by tag.
type descriptors map[uint64]*os.File

func (d descriptors) close() {
	for _, f := range d {
		f.Close()
	}
}

// takeDescriptors takes the descriptors that regions name, as far as they came.
func (x *session) takeDescriptors(regions []*proto.Region) descriptors {
	files := descriptors{}
	take := func(tag uint64) {
		if files[tag] == nil {
			if f := x.takeDescriptor(tag); f != nil {
				files[tag] = f
			}
		}
	}
	for _, r := range regions {
		switch h := r.GetHandle().(type) {
		case *proto.Region_Memfd:
			take(h.Memfd)
		case *proto.Region_CudaVmm:
			for _, s := range h.CudaVmm.GetSegments() {
				take(s.GetTag())
			}
		}
	}
	return files
}

// register maps what a REGISTER names. Its descriptors are used up, whatever becomes of it.
func (x *session) register(m *proto.Register) error {
	files := x.takeDescriptors(m.GetRegions())
	defer files.close()
	group, err := x.group(m.GetGroup())
	if err != nil {
		return err
	}
	if r := x.regs[group.ID]; r != nil {
		return faultf(proto.Code_CODE_BUSY, "group", "%d is registered already", group.ID)
	}
	r := &registration{group: group}
	if r.memory, err = x.mapRegions(group, m.GetRegions(), files, r); err != nil {
		x.unmapRegistration(r)
		return err
	}
	x.regs[group.ID] = r
	return nil
}

func (x *session) mapRegions(g *chunk.Group, regions []*proto.Region, files descriptors, r *registration) (transfer.Memory, error) {
	planes := g.Geometry.Planes
	if len(regions) != len(planes) {
		return nil, invalid("regions", "%d, group %d has %d planes", len(regions), g.ID, len(planes))
	}
	if _, device := onDevice(0, regions[0]); device {
		return x.importRegions(g, regions, files, r)
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
			return nil, faultf(proto.Code_CODE_UNKNOWN, at("regions", i, "memfd"), "no descriptor came under tag %d", tag)
		}
		a := byTag[tag]
		if a == nil {
			var err error
			if a, err = x.mapArena(files[tag]); err != nil {
				return nil, err
			}
			byTag[tag] = a
			r.maps = append(r.maps, a)
		}
		if err := checkRegion(i, m, planes[m.GetPlane()].PageBytes, a.file.size); err != nil {
			return nil, err
		}
		if m.GetBlocks() != regions[0].GetBlocks() {
			return nil, invalid(at("regions", i, "blocks"), "%d, regions[0] has %d", m.GetBlocks(), regions[0].GetBlocks())
		}
		out[m.GetPlane()] = transfer.HostRegion{Data: a.data, Offset: int64(m.GetOffset()), Stride: int64(m.GetStride()), Blocks: m.GetBlocks()}
	}
	mem, err := transfer.NewHostMemory(g.Geometry, out)
	if err != nil {
		return nil, invalid("regions", "%v", err)
	}
	return mem, nil
}

// checkPlane checks that a region is of a plane of the group's, and the first of that plane.
func checkPlane(i int, m *proto.Region, g *chunk.Group, taken func(uint32) bool) error {
	switch planes := len(g.Geometry.Planes); {
	case uint64(m.GetPlane()) >= uint64(planes):
		return invalid(at("regions", i, "plane"), "%d, group %d has %d planes", m.GetPlane(), g.ID, planes)
	case taken(m.GetPlane()):
		return invalid(at("regions", i, "plane"), "%d twice", m.GetPlane())
	}
	return nil
}

// checkRegion checks that every page lies within the file or allocation, without overflow whatever the numbers are.
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
		return invalid(at("regions", i, "blocks"), "%d of stride %d from offset %d do not lie within its memory's %d bytes",
			m.GetBlocks(), m.GetStride(), m.GetOffset(), size)
	}
	return nil
}

// unmapRegistration gives a registration's mappings up.
func (x *session) unmapRegistration(r *registration) {
	for _, m := range r.maps {
		x.unmapArena(m)
	}
	x.closeImports(r)
	r.maps, r.memory = nil, nil
}
