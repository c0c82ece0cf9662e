package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

type Config struct {
	GPU      *gds.GPU   // the GPU with the memory; nil: host memory
	FS       staging.FS // the files' of the plain threads; unused with InMemory
	Dir      string     // an existing directory; what is made in it is removed; unused with InMemory
	InMemory bool       // the root is page-locked memory: the copy alone is the only ceiling
	Geometry kv.Geometry
	DType    string // of the pages' values, one of package payload's: what compression gains depends on it
	// Compression has the settings of store.compression that are compared, each with a host of its own.
	// None: off alone.
	Compression []string
	Chunks      int
	Rounds      int // counted
	Threads     int // that read and write plain files
	SlotBytes   int
	Copiers     int              // goroutines of the copy alone
	Direct      *gds.DirectRoute // by which the plain threads move files; nil: they use the system's calls
	Host        *config.Config   // of which the socket, the log and the roots are replaced
	Root        config.Root      // the host's only one; its path is below Dir, unless InMemory
}

// bench is a case under way.
type bench struct {
	Config
	hosts    *hosts
	pages    pages
	image    [][]byte
	got      [][]byte            // what was loaded
	sessions []*session          // of each setting
	stored   []client.StoreChunk // of the last round
	slots    *staging.Slots      // of the ceilings
	blocks   *drive.Blocks
	made     bool // Dir is one of its own
}

// figures of one pass with one setting, by round.
type figures struct{ ours, cpu, stored, first, firstMS, wholeMS []float64 }

// ceilings are those of one pass, by round.
type ceilings struct{ copy, plain, plainCPU []float64 }

// passNames are the passes. Layer-wise loads are always staged, and have the ceilings of later loads.
var passNames = [...]string{"store", "load, first", "load, again", "load, by layer"}

const (
	stores = iota
	freshLoads
	laterLoads
	layerLoads
)

// results are the figures of all passes; those of ours by setting.
type results struct {
	ours     [][len(passNames)]figures
	ceilings [layerLoads]ceilings
}

// Run measures stores, first and later loads, and layer-wise loads, and fills a row for each but for its names.
func Run(ctx context.Context, c Config) (_ []Row, err error) {
	if c.Chunks < 1 || c.Rounds < 1 || c.Copiers < 1 {
		return nil, fmt.Errorf("%w: %d chunks, %d rounds, %d copiers", ErrConfig, c.Chunks, c.Rounds, c.Copiers)
	}
	b := &bench{Config: c, hosts: &hosts{host: c.Host, root: c.Root}}
	defer func() { err = errors.Join(err, b.end()) }()
	if err := b.begin(ctx); err != nil {
		return nil, err
	}
	var r results
	r.ours = slices.Grow(r.ours, len(b.sessions))[:len(b.sessions)]
	for round := range c.Rounds + 1 {
		if err := b.round(ctx, round, &r); err != nil {
			return nil, err
		}
	}
	var rows []Row
	for i, s := range b.sessions {
		route, err := s.host.routeTaken(ctx)
		if err != nil {
			return nil, err
		}
		for _, row := range r.rows(i, slices.Index(b.Compression, config.CompressionOff), b.Direct == nil) {
			row.Route, row.Compression = route, b.Compression[i]
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// begin makes the directory and the pages, and opens the sessions. end must follow, also after an error.
func (b *bench) begin(ctx context.Context) error {
	if len(b.Compression) == 0 {
		b.Compression = []string{config.CompressionOff}
	}
	if b.Direct != nil { // cuFile keeps files open, and their blocks are not free before it closes them
		b.FS = staging.OnRemove(b.FS, b.Direct.Handles.Forget)
	}
	if !b.InMemory {
		dir := filepath.Join(b.Dir, fmt.Sprintf(".kvhost-bench-%d-%d", os.Getpid(), time.Now().UnixNano()))
		if err := b.FS.Mkdir(dir, 0o700); err != nil {
			return fmt.Errorf("bench: %w", err)
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
	return err
}

// rows are those of a setting. plain is which setting is off, -1 if none is.
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
	b.blocks = drive.NewBlocks(b.Geometry, blocks, 1)
	var device string
	if b.GPU != nil {
		device = b.GPU.UUID.String()
		if err = b.slots.Register(b.GPU.Pinner()); err != nil {
			return err
		}
		b.pages, err = newDevicePages(b.GPU, b.Geometry, blocks)
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
		s, err := b.hosts.open(ctx, setting, filepath.Join(b.Dir, setting), client.Hello{
			Engine: "bench", Role: "worker", Namespace: b.namespace(), DeviceUUID: device,
		})
		if err != nil {
			return err
		}
		b.sessions = append(b.sessions, s)
		if err := b.pages.Register(ctx, s.rank.Session); err != nil {
			return err
		}
	}
	return nil
}

// namespace is that of the chunks.
func (b *bench) namespace() kv.Namespace {
	return kv.Namespace{Model: "bench", DType: b.DType, KeyBytes: 32, TokensPerBlock: 16,
		Groups: []kv.Group{{Geometry: b.Geometry}}}
}

// MemoryBytes is enough memory for a root that holds so many chunks.
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
