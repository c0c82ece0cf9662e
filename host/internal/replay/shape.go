package replay

import (
	"cmp"
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// Shape is the geometry of the replayed chunks.
type Shape struct {
	Ranks      int
	ChunkBytes int64 // page bytes of one chunk in one rank
	PageBytes  int64 // 0 means 16 KiB, or the whole chunk if it is smaller
	Layers     int   // 0 means two if the chunk has an even number of pages, and one otherwise
	// DType is the type of the values in the pages: one of package payload's. Empty means payload.U8.
	DType string
}

func (s Shape) content() (payload.Content, error) {
	c, err := payload.Of(s.dtype())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrOptions, err)
	}
	return c, nil
}

func (s Shape) dtype() string { return cmp.Or(s.DType, payload.U8) }

const defaultPageBytes = 16 << 10

// Geometry returns the geometry of one rank's chunk.
func (s Shape) Geometry() (kv.Geometry, error) {
	page := s.PageBytes
	if page == 0 {
		page = min(defaultPageBytes, s.ChunkBytes)
	}
	if page < 1 || s.ChunkBytes < page || s.ChunkBytes%page != 0 || page > kv.MaxPayload {
		return kv.Geometry{}, fmt.Errorf("%w: a chunk of %d bytes does not consist of pages of %d bytes",
			ErrOptions, s.ChunkBytes, page)
	}
	pages := s.ChunkBytes / page
	layers := int64(s.Layers)
	if layers == 0 {
		layers = 2 - pages%2
	}
	if layers < 1 || pages%layers != 0 || pages > kv.MaxBlocks*kv.MaxPlanes {
		return kv.Geometry{}, fmt.Errorf("%w: %d pages do not spread over %d layers", ErrOptions, pages, layers)
	}
	if layers > kv.MaxPlanes || pages/layers > kv.MaxBlocks {
		return kv.Geometry{}, fmt.Errorf("%w: %d layers of %d blocks", ErrOptions, layers, pages/layers)
	}
	g := kv.Uniform(uint32(pages/layers), uint32(layers), 1, uint32(page))
	if err := g.Validate(); err != nil {
		return kv.Geometry{}, fmt.Errorf("%w: %w", ErrOptions, err)
	}
	return g, nil
}

// Namespace returns the namespace for replays of this shape. All traces share it, because a key is the hash of its
// block's whole prefix.
func (s Shape) Namespace() (*kv.Namespace, error) {
	g, err := s.Geometry()
	if err != nil {
		return nil, err
	}
	n := &kv.Namespace{
		Model: "kvhost-replay", DType: s.dtype(), Engine: "kvhost-replay", HashAlgorithm: "xxh3-128-chain",
		KeyBytes: drive.KeyBytes, TokensPerBlock: 1, TensorParallel: s.Ranks, Extra: map[string]string{"payload": "1"},
		Groups: []kv.Group{{ID: drive.GroupID, Lookup: kv.ByPrefix, Geometry: g}},
	}
	if _, err := s.content(); err != nil {
		return nil, err
	}
	if s.Ranks < 1 || s.Ranks > kv.MaxRanks {
		return nil, fmt.Errorf("%w: %d ranks, want 1 to %d", ErrOptions, s.Ranks, kv.MaxRanks)
	}
	if err := n.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrOptions, err)
	}
	return n, nil
}

// EntryBytes returns the size on disk of one uncompressed entry of this shape under a layout policy, or under the built-in one
// if layout is nil. Each rank has a file with a header page, the checksum table and the payload, each padded to 4 KiB. A
// capacity of N times this size holds exactly N entries, if a chunk has at most 170 extents in a rank, which is about 10 MiB.
// Above that, more room is reserved, because the table of a compressed piece would be longer.
func (s Shape) EntryBytes(ctx context.Context, layout *policy.Module, config policy.Config) (int64, error) {
	n, err := s.Namespace()
	if err != nil {
		return 0, err
	}
	if layout == nil {
		layout = policy.Builtin(abi.RoleLayout)
	}
	l, err := layout.NewLayout(ctx, policy.LayoutOptions{Config: config})
	if err != nil {
		return 0, err
	}
	defer l.Close()
	plan, err := l.Plan(0, drive.GroupID, n.Text(), n.Groups[0].Geometry)
	if err != nil {
		return 0, err
	}
	return int64(n.Ranks()) * pieceformat.FileBytes(plan), nil
}
