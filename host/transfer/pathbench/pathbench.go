package pathbench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/transfer"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/memfs"
)

// Config is one case.
type Config struct {
	GPU      *gds.GPU   // whose memory; nil: host memory
	FS       staging.FS // the files'; unused with InMemory
	Dir      string     // an existing directory; what is made in it is removed; unused with InMemory
	InMemory bool       // the root is page-locked memory: the copy alone is the only ceiling
	Geometry chunk.Geometry
	Chunks   int
	Rounds   int // counted
	Engine   transfer.Config
	// of which the bench fills in the files and the roots
	Store   store.Config
	Copiers int                                                   // goroutines of the copy alone
	Direct  *gds.DirectRoute                                      // by which all pieces go; nil: they are staged
	Submit  gds.Submit                                            // how cuFile is asked then
	Profile func(pass string, round int) (stop func(), err error) // around what is timed of ours; optional
	// Open makes the path. Its files are to be below root, which does not exist yet, unless InMemory. Nil: store and
	// engine in this process.
	Open func(ctx context.Context, root string, shared Shared) (Path, error)
}

// bench is a case under way.
type bench struct {
	Config
	pages  pages
	image  [][]byte
	got    [][]byte // what was loaded
	path   Path
	stored []Chunk        // of the last round
	slots  *staging.Slots // of the ceilings
	rng    *rand.Rand
	inMem  *memfs.FS // of a root in memory in this process
	made   bool      // Dir is one of its own
	client int       // which of several it is
	ranks  int       // how many clients are one engine's ranks; 0: none
}

// figures of one pass, by round.
type figures struct{ ours, copy, plain, cpu, plainCPU, first, firstMS, wholeMS []float64 }

// results are the figures of all passes.
type results struct{ store, fresh, again, layers figures }

// Run measures stores, first and later loads, and layer-wise loads, and fills a row for each but for its names.
func Run(ctx context.Context, c Config) (_ []Row, err error) {
	if c.Chunks < 1 || c.Rounds < 1 || c.Copiers < 1 {
		return nil, fmt.Errorf("%w: %d chunks, %d rounds, %d copiers", ErrConfig, c.Chunks, c.Rounds, c.Copiers)
	}
	b := &bench{Config: c}
	defer func() { err = errors.Join(err, b.end()) }()
	if err := b.begin(ctx); err != nil {
		return nil, err
	}
	var r results
	for round := range c.Rounds + 1 {
		if err := b.round(ctx, round, &r); err != nil {
			return nil, err
		}
	}
	route, err := b.path.Route(ctx)
	if err != nil {
		return nil, err
	}
	rows := []Row{r.store.row("store"), r.fresh.row("load, first"), r.again.row("load, again")}
	if c.Direct == nil { // layers are always staged
		rows = append(rows, r.layers.row("load, by layer"))
	}
	for i := range rows {
		rows[i].Route = route
	}
	return rows, nil
}

// begin makes the directory, the pages and the path. end must follow, also after an error.
func (b *bench) begin(ctx context.Context) error {
	b.rng = rand.New(rand.NewPCG(1, 1+uint64(b.client)))
	if b.Direct != nil { // cuFile keeps files open, whose blocks are not free before it lets go of them
		b.FS = staging.OnRemove(b.FS, b.Direct.Handles.Forget)
	}
	if b.InMemory {
		if err := b.openMemory(); err != nil {
			return err
		}
	}
	if b.FS != nil { // of another process' root in memory there is nothing to see here
		dir := filepath.Join(b.Dir, fmt.Sprintf(".kvhost-bench-%d-%d", os.Getpid(), time.Now().UnixNano()))
		if err := b.FS.Mkdir(dir, 0o700); err != nil {
			return fmt.Errorf("pathbench: %w", err)
		}
		b.Dir, b.made = dir, true
	}
	return b.open(ctx)
}

// end closes and removes what begin made.
func (b *bench) end() error {
	err := b.close()
	if b.made {
		err = errors.Join(err, b.remove(b.Dir))
	}
	return errors.Join(err, b.closeMemory())
}

func (f *figures) row(pass string) Row {
	ratios := make([]float64, len(f.ours))
	for i := range ratios {
		ratios[i] = f.ours[i] / f.copy[i]
		if len(f.plain) > 0 {
			ratios[i] = f.ours[i] / min(f.copy[i], f.plain[i])
		}
	}
	r := Row{Pass: pass, Copy: spread(f.copy).Mid, Ours: spread(f.ours).Mid, Ratio: spread(ratios), CPU: spread(f.cpu).Mid}
	if len(f.plain) > 0 {
		r.Plain, r.PlainCPU = spread(f.plain).Mid, spread(f.plainCPU).Mid
	}
	if len(f.first) > 0 {
		first := spread(f.first)
		r.First, r.FirstMS, r.WholeMS = &first, spread(f.firstMS).Mid, spread(f.wholeMS).Mid
	}
	return r
}

func (b *bench) open(ctx context.Context) (err error) {
	if b.slots, err = staging.NewSlots(max(b.Engine.Threads, b.Copiers), b.Engine.SlotBytes); err != nil {
		return err
	}
	blocks := b.Chunks * int(b.Geometry.Blocks)
	if b.GPU != nil {
		if err = b.slots.Register(b.GPU.Pinner()); err != nil {
			return err
		}
		b.pages, err = newDevicePages(b.GPU, b.Geometry, blocks)
	} else {
		b.pages, err = newHostPages(b.Geometry, blocks)
	}
	if err != nil {
		return err
	}
	b.image, b.got = image(b.Geometry, blocks, b.client), image(b.Geometry, blocks, b.client)
	if b.Open == nil {
		b.path, err = b.openInner(ctx)
		return err
	}
	shared := Shared{Namespace: b.namespace(), Engine: fmt.Sprint("bench", b.client), Blocks: uint32(blocks)}
	if b.ranks > 0 {
		shared.Engine, shared.Rank = "bench", uint32(b.client)
	}
	if err = b.pages.share(&shared); err != nil {
		return err
	}
	b.path, err = b.Open(ctx, filepath.Join(b.Dir, "root"), shared)
	return err
}

// openMemory makes the memory that the files of a round take, page-locked for the GPU.
func (b *bench) openMemory() (err error) {
	b.FS, b.Dir = nil, ""
	if b.Open != nil { // it has memory of its own
		return nil
	}
	if b.inMem, err = memfs.New(MemoryBytes(b.Chunks, &b.Geometry), b.Store.Log); err != nil {
		return err
	}
	if b.GPU != nil {
		b.inMem.Start(nil, b.GPU.Pinner())
	} else {
		b.inMem.Start(nil)
	}
	b.FS, b.Dir = b.inMem, "/"
	<-b.inMem.Grown()
	return b.inMem.Stats().Short
}

// MemoryBytes is enough memory for a root that holds so many chunks.
func MemoryBytes(chunks int, g *chunk.Geometry) int64 {
	need := int64(chunks) * (g.PageBytes() + 64<<10)
	return need + need/16 + 64<<20
}

func (b *bench) closeMemory() error {
	if b.inMem == nil {
		return nil
	}
	return errors.Join(b.inMem.Unlock(), b.inMem.Close())
}

func (b *bench) close() error {
	var errs []error
	if b.path != nil {
		errs = append(errs, b.path.Close())
	}
	if b.slots != nil {
		errs = append(errs, b.slots.Close())
	}
	if b.pages != nil {
		errs = append(errs, b.pages.close())
	}
	return errors.Join(errs...)
}
