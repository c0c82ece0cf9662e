package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

type Config struct {
	Clients  int        // clients at the same time on one host, each with memory of its own
	GPUs     []*gds.GPU // GPU of each client's memory; none means host memory
	FS       staging.FS // file system for the plain threads; unused with InMemory
	Dir      string     // existing directory; files created there are removed; unused with InMemory
	InMemory bool       // the root is page-locked memory, so the plain copy is the only ceiling
	Geometry kv.Geometry
	Heads    drive.Heads // layout by which pages are stored
	DType    string      // type of the pages' values, one of package payload's; the gain of compression depends on it
	// Compression lists the values of store.compression to compare. Each has a host of its own. An empty list means
	// off.
	Compression []string
	Chunks      int
	Rounds      int // counted rounds
	Threads     int // threads of a client that read and write plain files
	SlotBytes   int
	Copiers     int              // goroutines of a client's plain copy
	Direct      *gds.DirectRoute // route by which the plain threads move files; nil means system calls
	Host        *config.Config   // its socket, log and roots are replaced
	Root        config.Root      // the host's only root; its path is below Dir, unless InMemory
}

// bench is a client during a measurement.
type bench struct {
	Config
	client   int
	gpu      *gds.GPU
	all      *meeting
	hosts    *hosts
	pages    pages
	image    [][]byte
	got      [][]byte            // loaded planes
	sessions []*session          // by setting
	stored   []client.StoreChunk // chunks of the last round
	slots    *staging.Slots      // slots for the ceilings
	blocks   *drive.Blocks
}

// figures are the results of one pass with one setting, by round.
type figures struct{ ours, cpu, stored, first, firstMS, wholeMS []float64 }

// ceilings are the ceilings of one pass, by round.
type ceilings struct{ copy, plain, plainCPU []float64 }

// passNames are the names of the passes. Layer-wise loads are always staged, and have the same ceilings as later loads.
var passNames = [...]string{"store", "load, first", "load, again", "load, by layer"}

const (
	stores = iota
	freshLoads
	laterLoads
	layerLoads
)

// results are the figures of all passes. Those of the hosts are by setting.
type results struct {
	ours     [][len(passNames)]figures
	ceilings [layerLoads]ceilings
}

// Run measures stores, first and later loads, and layer-wise loads. It returns a row for each, without the names of shape and
// files.
func Run(ctx context.Context, c Config) (rows []Row, err error) {
	if c.Chunks < 1 || c.Rounds < 1 || c.Copiers < 1 || c.Clients < 1 {
		return nil, fmt.Errorf("%w: %d chunks, %d rounds, %d copiers, %d clients", ErrConfig, c.Chunks, c.Rounds, c.Copiers, c.Clients)
	}
	if len(c.Compression) == 0 {
		c.Compression = []string{config.CompressionOff}
	}
	if c.Direct != nil { // cuFile keeps files open, so their blocks are not freed before it closes them
		c.FS = staging.OnRemove(c.FS, c.Direct.Handles.Forget)
	}
	if !c.InMemory {
		c.Dir = filepath.Join(c.Dir, fmt.Sprintf(".kvhost-bench-%d-%d", os.Getpid(), time.Now().UnixNano()))
		if err := c.FS.Mkdir(c.Dir, 0o700); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		defer func() { err = errors.Join(err, remove(c.FS, c.Dir)) }()
	}
	h := &hosts{host: c.Host, root: c.Root, dir: c.Dir}
	defer func() { err = errors.Join(err, h.close()) }()
	of := make([]results, c.Clients)
	all := newMeeting(c.Clients)
	work, run := errgroup.WithContext(ctx)
	for i := range of {
		b := &bench{Config: c, client: i, all: all, hosts: h}
		if len(c.GPUs) > 0 {
			b.gpu = c.GPUs[i]
		}
		b.Dir = filepath.Join(c.Dir, strconv.Itoa(i))
		work.Go(func() error { return b.run(run, &of[i]) })
	}
	if err := work.Wait(); err != nil {
		return nil, err
	}
	r := together(of)
	for i, setting := range c.Compression {
		host, err := h.of(ctx, setting)
		if err != nil {
			return nil, err
		}
		route, err := host.routeTaken(ctx)
		if err != nil {
			return nil, err
		}
		for _, row := range r.rows(i, slices.Index(c.Compression, config.CompressionOff), c.Direct == nil) {
			row.Clients, row.Route, row.Compression = c.Clients, route, setting
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// run makes all rounds of a client.
func (b *bench) run(ctx context.Context, r *results) (err error) {
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.open(ctx); err != nil {
		return err
	}
	r.ours = make([][len(passNames)]figures, len(b.sessions))
	for round := range b.Rounds + 1 {
		if err := b.round(ctx, round, r); err != nil {
			return err
		}
	}
	return nil
}

// together combines the results of clients that ran at the same time. The rate of a round is the rate of the slowest client times the
// number of clients. Each client has measured the processor time of all clients and divided it by its own bytes, so the mean is divided by
// the number once more.
func together(of []results) results {
	r, n := of[0], float64(len(of))
	for i := range r.ours {
		for pass := range r.ours[i] {
			sum := &r.ours[i][pass]
			for _, c := range of[1:] {
				f := &c.ours[i][pass]
				slowest(sum.ours, f.ours)
				add(sum.cpu, f.cpu)
				sum.first, sum.firstMS, sum.wholeMS = append(sum.first, f.first...), append(sum.firstMS, f.firstMS...), append(sum.wholeMS, f.wholeMS...)
			}
			scale(sum.ours, n)
			scale(sum.cpu, 1/n/n)
		}
	}
	for pass := range r.ceilings {
		sum := &r.ceilings[pass]
		for _, c := range of[1:] {
			slowest(sum.copy, c.ceilings[pass].copy)
			slowest(sum.plain, c.ceilings[pass].plain)
			add(sum.plainCPU, c.ceilings[pass].plainCPU)
		}
		scale(sum.copy, n)
		scale(sum.plain, n)
		scale(sum.plainCPU, 1/n/n)
	}
	return r
}

func slowest(a, b []float64) {
	for i := range a {
		a[i] = min(a[i], b[i])
	}
}

func add(a, b []float64) {
	for i := range a {
		a[i] += b[i]
	}
}

func scale(a []float64, by float64) {
	for i := range a {
		a[i] *= by
	}
}

// rows returns the rows of a setting. plain is the index of the setting "off", or -1 if it is not compared.
func (r *results) rows(setting, plain int, layers bool) (rows []Row) {
	for i := range r.ours[setting] {
		if i == layerLoads && !layers {
			break
		}
		f := &r.ours[setting][i]
		row := f.row(passNames[i], &r.ceilings[min(i, laterLoads)])
		row.Stored = spread(r.ours[setting][stores].stored).Mid
		if plain >= 0 && plain != setting {
			gain := spread(quotients(f.ours, r.ours[plain][i].ours))
			row.Gain = &gain
		}
		rows = append(rows, row)
	}
	return rows
}

func quotients(a, b []float64) []float64 {
	q := slices.Clone(a)
	for i := range q {
		q[i] /= b[i]
	}
	return q
}

func (f *figures) row(pass string, c *ceilings) Row {
	least := slices.Clone(c.copy)
	for i, plain := range c.plain {
		least[i] = min(least[i], plain)
	}
	ratio := spread(quotients(f.ours, least))
	r := Row{Pass: pass, Copy: spread(c.copy).Mid, Ours: spread(f.ours).Mid, Ratio: ratio, CPU: spread(f.cpu).Mid}
	if len(c.plain) > 0 {
		r.Plain, r.PlainCPU = spread(c.plain).Mid, spread(c.plainCPU).Mid
	}
	if len(f.first) > 0 {
		first := spread(f.first)
		r.First, r.FirstMS, r.WholeMS = &first, spread(f.firstMS).Mid, spread(f.wholeMS).Mid
	}
	return r
}

func (b *bench) open(ctx context.Context) (err error) {
	if b.slots, err = staging.NewSlots(max(b.Threads, b.Copiers), b.SlotBytes); err != nil {
		return err
	}
	blocks := b.Chunks * int(b.Geometry.Blocks)
	b.blocks = drive.NewBlocks(b.Geometry, blocks, uint64(1+b.client))
	var device string
	if b.gpu != nil {
		device = b.gpu.UUID.String()
		if err = b.slots.Register(b.gpu.Pinner()); err != nil {
			return err
		}
		b.pages, err = newDevicePages(b.gpu, b.Geometry, blocks)
	} else {
		var m *drive.Memory
		if m, err = drive.NewMemory(b.Geometry, blocks); err == nil {
			b.pages = hostPages{m}
		}
	}
	if err != nil {
		return err
	}
	content, err := payload.Of(b.DType)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrConfig, err)
	}
	b.image, b.got = image(b.Geometry, blocks, content), image(b.Geometry, blocks, nil)
	for _, setting := range b.Compression {
		s, err := b.hosts.open(ctx, setting, client.Hello{
			Engine: b.name(), Role: "worker", Namespace: b.namespace(), DeviceUUID: device,
		})
		if err != nil {
			return err
		}
		b.sessions = append(b.sessions, s)
		if err := b.pages.Register(ctx, s.rank.Session, b.Heads); err != nil {
			return err
		}
	}
	return nil
}

// name returns the client's name as an engine and as a model. No two clients have the same, so none finds the chunks of
// another.
func (b *bench) name() string { return fmt.Sprintf("bench-%d", b.client) }

// namespace returns the namespace of the chunks.
func (b *bench) namespace() kv.Namespace {
	return kv.Namespace{Model: b.name(), DType: b.DType, KeyBytes: 32, TokensPerBlock: 16,
		Units: b.Heads.Units, Groups: []kv.Group{{Geometry: b.Heads.Geometry(b.Geometry)}}}
}

// MemoryBytes returns a capacity that is enough for a root in memory with the given number of chunks.
func MemoryBytes(chunks int, g *kv.Geometry) int64 {
	need := int64(chunks) * (g.PageBytes() + 64<<10)
	return need + need/16 + 64<<20
}

func (b *bench) close() error {
	var errs []error
	for _, s := range b.sessions {
		errs = append(errs, s.close())
	}
	if b.slots != nil {
		errs = append(errs, b.slots.Close())
	}
	if b.pages != nil {
		errs = append(errs, b.pages.Close())
	}
	return errors.Join(errs...)
}
