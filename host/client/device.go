package client

import (
	"context"
	"fmt"

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
