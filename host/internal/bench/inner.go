package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/codec/choice"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// inner is the path of a store and an engine in this process, without a host around them.
type inner struct {
	fs       staging.FS
	root     string
	inMemory bool
	direct   *gds.DirectRoute
	store    *store.Store
	space    *catalog.Namespace
	engine   *transfer.Engine
	queue    *transfer.Queue
	memory   transfer.Memory
	known    map[string]bool
	files    []string // of the last store
}

// capacity is more than any case takes: the store goes on counting the files of past rounds.
const capacity = 1 << 42

func (b *bench) openInner(ctx context.Context, compression string) (_ Path, err error) {
	p := &inner{fs: b.FS, root: filepath.Join(b.Dir, compression), inMemory: b.InMemory, direct: b.Direct,
		memory: b.pages.memory(), known: map[string]bool{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	cfg := b.Store
	cfg.FS, cfg.Roots = b.FS, []store.RootConfig{{Path: p.root, Capacity: capacity, MaxEntries: 1 << 16,
		Compressed: compression != off, Volatile: b.InMemory}}
	if compression == auto {
		cfg.Compression.Rest = choice.Faster
	}
	if p.store, err = store.Open(ctx, cfg); err != nil {
		return nil, err
	}
	space := b.namespace()
	if p.space, err = p.store.Namespace(ctx, &space); err != nil {
		return nil, err
	}
	if p.engine, err = transfer.New(b.Engine); err != nil {
		return nil, err
	}
	device := ""
	if b.GPU != nil {
		if err = p.engine.AddGPU(b.GPU); err != nil {
			return nil, err
		}
		device = b.GPU.UUID.String()
	}
	if b.Direct != nil {
		p.engine.SetRoute(b.GPU, p.root, transfer.RouteChoice{Direct: b.Direct, Submit: b.Submit, Always: true})
	}
	if p.queue, err = p.engine.Queue(device); err != nil {
		return nil, err
	}
	return p, nil
}

// Store stores all chunks in one job.
func (p *inner) Store(ctx context.Context, chunks []Chunk) (time.Duration, error) {
	start := time.Now()
	done := make(chan transfer.Outcome, 1)
	job := &transfer.StoreJob{Memory: p.memory, Read: func(transfer.Outcome) {},
		Published: func(o transfer.Outcome) { done <- o }}
	for _, c := range chunks {
		put, err := p.store.Put(ctx, store.PutRequest{Namespace: p.space, Parent: c.Parent, Key: c.Key, Depth: c.Depth,
			Ranks: 1})
		if err != nil {
			for _, c := range job.Chunks {
				c.Put.Abort(err)
			}
			return 0, err
		}
		job.Chunks = append(job.Chunks, transfer.StoreChunk{Put: put, Blocks: c.Blocks})
	}
	p.queue.Store(job)
	err := failure(<-done)
	took := time.Since(start)
	if err == nil {
		err = p.remember()
	}
	return took, err
}

func failure(o transfer.Outcome) error {
	if len(o.Failed) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d, chunk %d: %w", ErrPath, len(o.Failed), o.Failed[0].Chunk, o.Failed[0].Err)
}

// Load loads all chunks in one job.
func (p *inner) Load(_ context.Context, chunks []Chunk, byLayer bool) (first, whole time.Duration, err error) {
	start := time.Now()
	var layers *transfer.Layers
	if byLayer {
		layers = &transfer.Layers{Landed: func(uint32, []int) {
			if first == 0 {
				first = time.Since(start)
			}
		}}
	}
	l, err := p.store.Lookup(store.LookupRequest{Namespace: p.space, Keys: Keys(chunks), Ranks: 1})
	if err != nil {
		return 0, 0, err
	}
	defer l.Release()
	if l.Hits() != len(chunks) {
		return 0, 0, fmt.Errorf("%w: %d of %d are there", ErrPath, l.Hits(), len(chunks))
	}
	done := make(chan transfer.Outcome, 1)
	job := &transfer.LoadJob{Lease: l, Memory: p.memory, Layers: layers, Done: func(o transfer.Outcome) { done <- o }}
	for n, c := range chunks {
		job.Chunks = append(job.Chunks, transfer.LoadChunk{Index: n, Blocks: c.Blocks})
	}
	p.queue.Load(job)
	err = failure(<-done)
	return first, time.Since(start), err
}

// remember notes which piece files are new since it was last asked.
func (p *inner) remember() error {
	p.files = nil
	return staging.Walk(context.Background(), p.fs, p.root, 1, func(rel string, _ fs.DirEntry) {
		if name := filepath.Join(p.root, rel); !p.known[name] {
			p.known[name] = true
			p.files = append(p.files, name)
		}
	}, func(string, error) {})
}

// Forget removes the last round's files behind the store's back: files that stay are written back while others are timed.
// What the store thinks of past rounds does not matter here.
func (p *inner) Forget(context.Context, []Chunk) error {
	for _, name := range p.files {
		if err := p.fs.Remove(name); err != nil {
			return err
		}
	}
	p.files = nil
	return nil
}

func (p *inner) Processor() time.Duration { return 0 }

func (p *inner) Used(context.Context) (int64, error) { return p.store.Stats().Roots[0].Used, nil }

// Route is what cuFile itself says of the bytes; pieces that were staged in its place would spoil the figures.
func (p *inner) Route(context.Context) (string, error) {
	if p.inMemory {
		return "memory", nil
	}
	if p.direct == nil {
		return "staged", nil
	}
	for _, r := range p.engine.Routes() {
		if n := r.LoadFallbacks + r.StoreFallbacks + r.Full; n > 0 {
			return "", fmt.Errorf("%w: %d pieces of the direct route were staged", ErrPath, n)
		}
	}
	taken, err := p.direct.CuFile().Stats()
	if err != nil {
		return "direct", nil // an older cuFile does not say
	}
	return "direct: " + taken.String(), nil
}

func (p *inner) Close() error {
	var errs []error
	if p.engine != nil {
		errs = append(errs, p.engine.Close())
	}
	if p.store != nil {
		errs = append(errs, p.store.Close())
	}
	return errors.Join(errs...)
}

// namespace is that of the chunks.
func (b *bench) namespace() kv.Namespace {
	return kv.Namespace{Model: "bench", DType: b.DType, KeyBytes: 32, TokensPerBlock: 16,
		TensorParallel: b.ranks, Groups: []kv.Group{{Geometry: b.Geometry}}}
}
