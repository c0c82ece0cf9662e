package client

import (
	"context"
	"fmt"
	"os"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// RegisterIPC registers a group's pages on the GPU that Hello named. handles[i] is the result of cuIpcGetMemHandle
// for plane i's allocation, and the plane's offset counts from that allocation's start (cuMemGetAddressRange).
// Planes in one allocation have the same handle.
func (s *Session) RegisterIPC(ctx context.Context, group uint32, handles [][]byte,
	planes []PlaneRegion) (*Registration, error) {
	if len(handles) != len(planes) {
		return nil, fmt.Errorf("%w: %d handles for %d planes", ErrArena, len(handles), len(planes))
	}
	return s.register(ctx, group, planes,
		func(i int) *proto.Region { return &proto.Region{Handle: &proto.Region_CudaIpc{CudaIpc: handles[i]}} })
}

// Segment is memory of cuMemCreate: its descriptor of cuMemExportToShareableHandle, and its size.
type Segment struct {
	File  *os.File
	Bytes int64
}

// RegisterVMM is RegisterIPC for memory of cuMemCreate. All planes are in the segments, which the host maps one
// after the other; offsets count from the start of the first. The caller keeps the files.
func (s *Session) RegisterVMM(ctx context.Context, group uint32, segments []Segment,
	planes []PlaneRegion) (*Registration, error) {
	m, err := s.passSegments(ctx, segments)
	if err != nil {
		return nil, err
	}
	return s.register(ctx, group, planes,
		func(int) *proto.Region { return &proto.Region{Handle: &proto.Region_CudaVmm{CudaVmm: m}} })
}

// passSegments sends the segments' descriptors to the host.
func (s *Session) passSegments(ctx context.Context, segments []Segment) (*proto.CudaVmm, error) {
	m := &proto.CudaVmm{}
	for i, seg := range segments {
		if seg.Bytes < 0 {
			return nil, fmt.Errorf("%w: segment %d has %d bytes", ErrArena, i, seg.Bytes)
		}
		tag, err := s.passFile(ctx, seg.File)
		if err != nil {
			return nil, err
		}
		m.Segments = append(m.Segments, &proto.CudaVmmSegment{Tag: tag, Bytes: uint64(seg.Bytes)})
	}
	return m, nil
}
