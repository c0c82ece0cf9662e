package server

import (
	"fmt"
	"strings"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/transfer"
)

// deviceName is a HELLO's device in the one form that GPUs are known by here; what is no GPU's UUID stays as it is.
func deviceName(uuid string) string {
	if u, err := gds.ParseUUID(uuid); err == nil {
		return u.String()
	}
	return uuid
}

// gpuOf is the GPU of a session's device, nil when this host has none such.
func (s *Server) gpuOf(device string) *gds.GPU {
	for _, g := range s.cfg.GPUs {
		if g.UUID.String() == device {
			return g
		}
	}
	return nil
}

// noGPU says why device memory cannot be registered.
func (x *session) noGPU(field string) error {
	if x.device == "" {
		return faultf(proto.Code_CODE_UNKNOWN, field, "memory of a GPU, and HELLO named none (device_uuid)")
	}
	var have []string
	for _, g := range x.server.cfg.GPUs {
		have = append(have, g.UUID.String())
	}
	if len(have) == 0 {
		return faultf(proto.Code_CODE_UNKNOWN, field, "memory of %s, and this host uses no GPU", x.device)
	}
	return faultf(proto.Code_CODE_UNKNOWN, field, "memory of %s, this host has %s", x.device, strings.Join(have, ", "))
}

// onDevice says whether a region is of a GPU's memory, and names its field.
func onDevice(i int, m *proto.Region) (field string, ok bool) {
	switch m.GetHandle().(type) {
	case *proto.Region_CudaIpc:
		return at("regions", i, "cuda_ipc"), true
	case *proto.Region_CudaVmm:
		return at("regions", i, "cuda_vmm"), true
	}
	return at("regions", i, "handle"), false
}

// importRegions imports the allocations that a REGISTER names, each once, and makes the group's memory of them.
func (x *session) importRegions(g *chunk.Group, regions []*proto.Region, files descriptors, r *registration) (transfer.Memory, error) {
	planes := g.Geometry.Planes
	known := map[string]*gds.Import{}
	out := make([]transfer.DeviceRegion, len(planes))
	for i, m := range regions {
		field, ok := onDevice(i, m)
		switch {
		case !ok:
			return nil, invalid(field, "host memory, regions[0] is a GPU's")
		case x.gpu == nil:
			return nil, x.noGPU(field)
		}
		if err := checkPlane(i, m, g, func(p uint32) bool { return out[p].Blocks != 0 }); err != nil {
			return nil, err
		}
		mem, err := x.importHandle(field, m, files, known, r)
		if err != nil {
			return nil, err
		}
		if err := checkRegion(i, m, planes[m.GetPlane()].PageBytes, mem.Size); err != nil {
			return nil, err
		}
		if m.GetBlocks() != regions[0].GetBlocks() {
			return nil, invalid(at("regions", i, "blocks"), "%d, regions[0] has %d", m.GetBlocks(), regions[0].GetBlocks())
		}
		out[m.GetPlane()] = transfer.DeviceRegion{
			Base: mem.Base, Bytes: mem.Size, Offset: int64(m.GetOffset()), Stride: int64(m.GetStride()), Blocks: m.GetBlocks(),
		}
	}
	mem, err := transfer.NewDeviceMemory(x.gpu, g.Geometry, out)
	if err != nil {
		return nil, invalid("regions", "%v", err)
	}
	return mem, nil
}

// importHandle imports one region's allocation, or finds it among those of this REGISTER.
func (x *session) importHandle(field string, m *proto.Region, files descriptors, known map[string]*gds.Import, r *registration) (*gds.Import, error) {
	name := "ipc " + string(m.GetCudaIpc())
	segments := m.GetCudaVmm().GetSegments()
	if m.GetCudaVmm() != nil {
		name = fmt.Sprint("vmm ", segments)
	}
	if mem := known[name]; mem != nil {
		return mem, nil
	}
	var mem *gds.Import
	var err error
	if m.GetCudaVmm() == nil {
		mem, err = x.gpu.ImportIPC(m.GetCudaIpc())
	} else {
		list := make([]gds.Segment, len(segments))
		for k, s := range segments {
			f := files[s.GetTag()]
			if f == nil {
				return nil, faultf(proto.Code_CODE_UNKNOWN, field, "segments[%d]: no descriptor came under tag %d", k, s.GetTag())
			}
			list[k] = gds.Segment{FD: int(f.Fd()), Size: int64(min(s.GetBytes(), 1<<62))}
		}
		mem, err = x.gpu.ImportVMM(list)
	}
	if err != nil {
		return nil, invalid(field, "%v", err)
	}
	known[name] = mem
	r.imports = append(r.imports, mem)
	return mem, nil
}

// closeImports gives a registration's device memory up. No copy can touch it any more.
func (x *session) closeImports(r *registration) {
	for _, m := range r.imports {
		if err := m.Close(); err != nil {
			x.log.Error("unmap device memory", "error", err)
		}
	}
	r.imports = nil
}
