package pathbench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/transfer"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/memfs"
	"golang.org/x/sys/unix"
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
}

// bench is a case under way.
type bench struct {
	Config
	pages  pages
	image  [][]byte
	got    [][]byte // what was loaded
	store  *store.Store
	space  *catalog.Namespace
	engine *transfer.Engine
	queue  *transfer.Queue
	slots  *staging.Slots // of the ceilings
	rng    *rand.Rand
	known  map[string]bool
	files  []string // of the last store
	size   int64    // of each
	first  time.Duration
	inMem  *memfs.FS // of a root in memory
}

// figures of one pass, by round.
type figures struct{ ours, copy, plain, cpu, plainCPU, first, firstMS, wholeMS []float64 }

// Run measures stores, loads and layer-wise loads, and fills a row for each but for its names.
func Run(ctx context.Context, c Config) (_ []Row, err error) {
	if c.Chunks < 1 || c.Rounds < 1 || c.Copiers < 1 {
		return nil, fmt.Errorf("%w: %d chunks, %d rounds, %d copiers", ErrConfig, c.Chunks, c.Rounds, c.Copiers)
	}
	b := &bench{Config: c, rng: rand.New(rand.NewPCG(1, 1)), known: map[string]bool{}}
	if c.Direct != nil { // cuFile keeps files open, whose blocks are not free before it lets go of them
		b.FS = staging.OnRemove(c.FS, c.Direct.Handles.Forget)
	}
	defer func() { err = errors.Join(err, b.closeMemory()) }()
	if c.InMemory {
		if err := b.openMemory(); err != nil {
			return nil, err
		}
	}
	b.Dir = filepath.Join(b.Dir, fmt.Sprintf(".kvhost-bench-%d-%d", os.Getpid(), time.Now().UnixNano()))
	if err := b.FS.Mkdir(b.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("pathbench: %w", err)
	}
	defer func() { err = errors.Join(err, b.remove(b.Dir)) }()
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.open(ctx); err != nil {
		return nil, err
	}
	var stores, loads, layers figures
	for round := range c.Rounds + 1 {
		if err := b.round(ctx, round, &stores, &loads, &layers); err != nil {
			return nil, err
		}
	}
	route := "staged"
	if c.InMemory {
		route = "memory"
	}
	if c.Direct != nil {
		if route, err = b.routeTaken(); err != nil {
			return nil, err
		}
	}
	rows := []Row{stores.row("store"), loads.row("load")}
	if c.Direct == nil { // layers are always staged
		rows = append(rows, layers.row("load, by layer"))
	}
	for i := range rows {
		rows[i].Route = route
	}
	return rows, nil
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

// pass is one thing that is timed.
type pass struct {
	name              string // of ours
	ready, run, check func() error
	rate, cpu         *[]float64
}

// round makes every pass once, in an order that alternates.
func (b *bench) round(ctx context.Context, round int, stores, loads, layers *figures) error {
	perm, back, again := b.shuffle(), b.shuffle(), b.shuffle()
	plain := filepath.Join(b.Dir, "plain")
	groups := [][]pass{
		{
			{"", nil, func() error { return b.copyAll(ctx, gds.Gather) }, nil, &stores.copy, nil},
			{"store", b.restore, func() error { return b.storeAll(ctx, round, perm) }, b.remember, &stores.ours,
				&stores.cpu},
			{"", nil, func() error { return b.writeFiles(ctx, plain, round) }, func() error { return b.remove(plain) },
				&stores.plain, &stores.plainCPU},
		},
		{
			{"", nil, func() error { return b.copyAll(ctx, gds.Scatter) }, nil, &loads.copy, nil},
			{"layers", b.poison, func() error { return b.loadLayers(round, again) },
				func() error { return compare(b.pages, b.Geometry, b.image, b.got, perm, again) }, &layers.ours,
				&layers.cpu},
			{"load", b.poison, func() error { return b.loadAll(round, back, nil) },
				func() error { return compare(b.pages, b.Geometry, b.image, b.got, perm, back) }, &loads.ours,
				&loads.cpu},
			{"", nil, func() error { return b.readFiles(ctx) }, nil, &loads.plain, &loads.plainCPU},
		},
	}
	if b.Direct != nil {
		groups[1] = slices.Delete(groups[1], 1, 2)
	}
	if b.InMemory { // threads that only read or write would measure another copy
		for i, g := range groups {
			groups[i] = g[:len(g)-1]
		}
	}
	if err := b.forget(); err != nil {
		return err
	}
	gb := float64(b.Chunks) * float64(b.Geometry.PageBytes()) / 1e9
	for i, passes := range groups {
		if i == 1 && !b.InMemory {
			if err := b.warm(ctx); err != nil {
				return err
			}
		}
		if round%2 == 1 {
			slices.Reverse(passes)
		}
		for _, p := range passes {
			took, used, err := b.time(ctx, &p, round)
			if err != nil {
				return err
			}
			if round == 0 {
				continue
			}
			*p.rate = append(*p.rate, gb/took.Seconds())
			if p.cpu != nil {
				*p.cpu = append(*p.cpu, used.Seconds()/gb)
			}
			if p.rate == &layers.ours {
				layers.first = append(layers.first, b.first.Seconds()/took.Seconds())
				layers.firstMS = append(layers.firstMS, 1e3*b.first.Seconds())
				layers.wholeMS = append(layers.wholeMS, 1e3*took.Seconds())
			}
		}
	}
	if round > 0 && b.Direct == nil { // the ceilings are the same
		n := len(loads.copy) - 1
		layers.copy = append(layers.copy, loads.copy[n])
		if !b.InMemory {
			layers.plain, layers.plainCPU = append(layers.plain, loads.plain[n]), append(layers.plainCPU,
				loads.plainCPU[n])
		}
	}
	return nil
}

func (b *bench) time(ctx context.Context, p *pass, round int) (took, used time.Duration, err error) {
	if err := ctx.Err(); err != nil {
		return 0, 0, err
	}
	if p.ready != nil {
		if err := p.ready(); err != nil {
			return 0, 0, err
		}
	}
	stop := func() {}
	if b.Profile != nil && p.name != "" {
		if stop, err = b.Profile(p.name, round); err != nil {
			return 0, 0, err
		}
	}
	before, start := processor(), time.Now()
	err = p.run()
	took, used = time.Since(start), processor()-before
	stop()
	if err != nil {
		return 0, 0, err
	}
	if p.check != nil {
		err = p.check()
	}
	return took, used, err
}

// processor is the time that this process has had.
func processor() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// routeTaken is what cuFile itself says of the bytes; pieces that were staged in its place would spoil the figures.
func (b *bench) routeTaken() (string, error) {
	for _, r := range b.engine.Routes() {
		if n := r.LoadFallbacks + r.StoreFallbacks + r.Full; n > 0 {
			return "", fmt.Errorf("%w: %d pieces of the direct route were staged", ErrPath, n)
		}
	}
	taken, err := b.Direct.CuFile().Stats()
	if err != nil {
		return "direct", nil // an older cuFile does not say
	}
	return "direct: " + taken.String(), nil
}

// capacity is more than any case takes: the store goes on counting the files of past rounds.
const capacity = 1 << 42

func (b *bench) open(ctx context.Context) (err error) {
	cfg := b.Store
	cfg.FS, cfg.Roots = b.FS, []store.RootConfig{{Path: filepath.Join(b.Dir, "root"), Capacity: capacity,
		MaxEntries: 1 << 16}}
	b.store, err = store.Open(ctx, cfg)
	if err != nil {
		return err
	}
	b.space, err = b.store.Namespace(ctx, &chunk.Namespace{
		Model: "bench", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16, Groups: []chunk.Group{{Geometry: b.Geometry}},
	})
	if err != nil {
		return err
	}
	if b.engine, err = transfer.New(b.Engine); err != nil {
		return err
	}
	if b.slots, err = staging.NewSlots(max(b.Engine.Threads, b.Copiers), b.Engine.SlotBytes); err != nil {
		return err
	}
	device, blocks := "", b.Chunks*int(b.Geometry.Blocks)
	if b.GPU != nil {
		if err = errors.Join(b.engine.AddGPU(b.GPU), b.slots.Register(b.GPU.Pinner())); err != nil {
			return err
		}
		device = b.GPU.UUID.String()
		b.pages, err = newDevicePages(b.GPU, b.Geometry, blocks)
	} else {
		b.pages, err = newHostPages(b.Geometry, blocks)
	}
	if err != nil {
		return err
	}
	if b.Direct != nil {
		b.engine.SetRoute(b.GPU, filepath.Join(b.Dir, "root"),
			transfer.RouteChoice{Direct: b.Direct, Submit: b.Submit, Always: true})
	}
	b.image, b.got = image(b.Geometry, blocks), image(b.Geometry, blocks)
	b.queue, err = b.engine.Queue(device)
	return err
}

// openMemory makes the memory that the files of a round take, page-locked for the GPU.
func (b *bench) openMemory() (err error) {
	need := int64(b.Chunks) * (b.Geometry.PageBytes() + 64<<10)
	if b.inMem, err = memfs.New(need+need/16+64<<20, b.Store.Log); err != nil {
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

func (b *bench) closeMemory() error {
	if b.inMem == nil {
		return nil
	}
	return errors.Join(b.inMem.Unlock(), b.inMem.Close())
}

func (b *bench) close() error {
	var errs []error
	if b.engine != nil {
		errs = append(errs, b.engine.Close())
	}
	if b.slots != nil {
		errs = append(errs, b.slots.Close())
	}
	if b.store != nil {
		errs = append(errs, b.store.Close())
	}
	if b.pages != nil {
		errs = append(errs, b.pages.close())
	}
	return errors.Join(errs...)
}

func (b *bench) restore() error {
	return planes(b.Geometry, func(i int) error { return b.pages.set(i, b.image[i]) })
}

func (b *bench) poison() error {
	return planes(b.Geometry, func(i int) error { return b.pages.set(i, nil) })
}

// shuffle deals all blocks to the chunks.
func (b *bench) shuffle() [][]uint32 {
	per := int(b.Geometry.Blocks)
	perm := b.rng.Perm(b.Chunks * per)
	out := make([][]uint32, b.Chunks)
	for c := range out {
		for i := range per {
			out[c] = append(out[c], uint32(perm[c*per+i]))
		}
	}
	return out
}
