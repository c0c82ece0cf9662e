package server

import (
	"sync/atomic"
	"unsafe"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// hostSemaphores are semaphores in mapped memory of a client.
type hostSemaphores struct {
	values []uint64
	memory [][]byte // mapped memory that contains values
}

func (s hostSemaphores) Load(i int) (v uint64, err error) {
	err = transfer.Guard(s.memory, func() error {
		v = atomic.LoadUint64(&s.values[i])
		return nil
	})
	return v, err
}

func (s hostSemaphores) Store(i int, v uint64) error {
	return transfer.Guard(s.memory, func() error {
		atomic.StoreUint64(&s.values[i], v)
		return nil
	})
}

// maxSemaphores is the maximum number of semaphores that a session can share.
const maxSemaphores = 1 << 20

// mapSemaphores maps the semaphores that a message names. It takes the descriptor that the message names, even if it fails.
func (c *clientMemory) mapSemaphores(m *proto.Semaphores) (*sharedSemaphores, error) {
	region := &proto.Region{Offset: m.GetOffset()}
	switch h := m.GetHandle().(type) {
	case *proto.Semaphores_Memfd:
		region.Handle = &proto.Region_Memfd{Memfd: h.Memfd}
	case *proto.Semaphores_CudaIpc:
		region.Handle = &proto.Region_CudaIpc{CudaIpc: h.CudaIpc}
	}
	files := c.takeDescriptors([]*proto.Region{region})
	defer files.close()
	switch {
	case m.GetCount() == 0 || m.GetCount() > maxSemaphores:
		return nil, invalid("count", "%d semaphores, want 1 to %d", m.GetCount(), maxSemaphores)
	case m.GetOffset()%8 != 0 || m.GetOffset() > 1<<62:
		return nil, invalid("offset", "%d is no multiple of 8 within any memory", m.GetOffset())
	}
	s := &sharedSemaphores{count: int(m.GetCount())}
	if err := c.mapInto(s, region, files); err != nil {
		c.unmapSemaphores(s)
		return nil, err
	}
	return s, nil
}

// mapInto maps the memory of semaphores. Mapped memory is added to s even if mapInto fails.
func (c *clientMemory) mapInto(s *sharedSemaphores, r *proto.Region, files descriptors) (err error) {
	off, size := int64(r.GetOffset()), 8*int64(s.count)
	switch h := r.GetHandle().(type) {
	case *proto.Region_Memfd:
		f := files[h.Memfd]
		if f == nil {
			return faultf(proto.Code_CODE_UNKNOWN, "memfd", "no descriptor came under tag %d", h.Memfd)
		}
		if s.mapping, err = c.mapFile(f); err != nil {
			return err
		}
		if off > s.mapping.file.Size-size {
			return invalid("offset", "%d words from offset %d do not fit %d bytes", s.count, off, s.mapping.file.Size)
		}
		data := s.mapping.data
		values := unsafe.Slice((*uint64)(unsafe.Pointer(&data[off])), s.count)
		s.semaphores = hostSemaphores{values: values, memory: [][]byte{data}}
		return nil
	case *proto.Region_CudaIpc:
		if c.gpu == nil {
			return c.noGPU("handle")
		}
		s.keep = &registration{}
		mem, err := c.importHandle("handle", h.CudaIpc, map[string]*gds.Import{}, s.keep)
		if err != nil {
			return err
		}
		if off > mem.Size-size {
			return invalid("offset", "%d words from offset %d do not fit %d bytes", s.count, off, mem.Size)
		}
		if s.device, err = c.gpu.NewSemaphores(mem.Base+uint64(off), s.count); err != nil {
			return err
		}
		s.semaphores = s.device
		return nil
	}
	return invalid("handle", "none that this host knows")
}

// unmapSemaphores unmaps the memory of semaphores. No job may use them any more. s may be nil.
func (c *clientMemory) unmapSemaphores(s *sharedSemaphores) {
	if s == nil {
		return
	}
	if s.device != nil {
		if err := s.device.Close(); err != nil {
			c.log.Error("cannot unmap semaphores", "error", err)
		}
	}
	if s.keep != nil {
		c.unmap(s.keep)
	}
	if s.mapping != nil {
		c.unmapFile(s.mapping)
	}
}
