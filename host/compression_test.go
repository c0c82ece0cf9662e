package host_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

// compressionRank is one of two ranks of an engine whose cache is bf16: a session, and its pages.
type compressionRank struct {
	*hosttest.Client
	t    *testing.T
	rank int
}

const (
	ranks       = 2
	blocks      = 4 // of a chunk
	layers      = 4
	planeCount  = 2 * layers
	pageBytes   = 16 << 10
	pageStride  = pageBytes + 64 // a copy that runs over is seen
	arenaBlocks = 16
	chunkBytes  = ranks * blocks * planeCount * pageBytes
)

func dialRank(t *testing.T, h *host.Host, model string, rank int) *compressionRank {
	t.Helper()
	hello := hosttest.Hello(h.Socket(), kv.Uniform(blocks, layers, 2, pageBytes))
	hello.Engine, hello.Rank, hello.LocalRanks, hello.Namespace = "engine of "+model, uint32(rank), ranks, rankSpace(model)
	return &compressionRank{hosttest.Dial(t, hello, arenaBlocks, pageStride-pageBytes, 0), t, rank}
}

// rankSpace is the namespace of an engine of two ranks.
func rankSpace(model string) kv.Namespace {
	n := hosttest.Hello("", kv.Uniform(blocks, layers, 2, pageBytes)).Namespace
	n.Model, n.DType, n.TensorParallel = model, "bfloat16", ranks
	return n
}

// twoRanks starts a host with both ranks of an engine, until stop ends them.
func twoRanks(t *testing.T, c host.Config) (h *host.Host, two []*compressionRank, stop func()) {
	h, end := hosttest.StartWith(t, c)
	for rank := range ranks {
		two = append(two, dialRank(t, h, "m", rank))
	}
	return h, two, func() {
		for _, r := range two {
			r.Close()
		}
		end()
	}
}

// values is what a page holds: a normal distribution's values in bf16, which follow from where they belong.
func values(n, rank, plane, block int) []byte {
	at := [...]int{n, rank, plane, block}
	if page, made := valuesMade.Load(at); made {
		return page.([]byte)
	}
	page, key := make([]byte, pageBytes), compressionKey(n)
	bfloat16.Fill(page, payload.Seed(&key, uint32(rank), kv.Plane{Layer: uint32(plane)}, uint32(block)))
	valuesMade.Store(at, page)
	return page
}

var valuesMade sync.Map // what values has made, which takes longer than all else under the race detector

var bfloat16, _ = payload.Of(payload.BFloat16)

func compressionKey(n int) (k kv.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(n)+1)
	k[31] = 9
	return k
}

// ids are a chunk's blocks, in any order.
func ids(random *rand.Rand) (list []uint32) {
	for _, id := range random.Perm(arenaBlocks)[:blocks] {
		list = append(list, uint32(id))
	}
	return list
}

func (r *compressionRank) store(n int, random *rand.Rand) {
	r.t.Helper()
	at := ids(random)
	r.Poison()
	for plane := range planeCount {
		for b, id := range at {
			copy(r.Page(plane, int(id)), values(n, r.rank, plane, b))
		}
	}
	if o := r.Put(client.StoreChunk{Key: compressionKey(n), Blocks: at}); o.Bytes != chunkBytes/ranks {
		r.t.Fatalf("chunk %d: %+v, want %d bytes", n, o, chunkBytes/ranks)
	}
}

// load says whether the chunk is there, and brings it, whole or layer-wise. Every byte must be right: of the pages, and
// of all that no page of the chunk is.
func (r *compressionRank) load(n int, layerwise bool, random *rand.Rand) bool {
	r.t.Helper()
	at, l := ids(random), r.Find(compressionKey(n))
	if l.Hits() == 0 {
		return false
	}
	r.Poison()
	options, landed := client.LoadOptions{}, 0
	if layerwise {
		options.Layers = func(uint32, []int) { landed++ }
	}
	if o := r.Get(l, options, client.LoadChunk{Blocks: at}); len(o.Failed) > 0 {
		r.t.Fatalf("chunk %d: %+v, want no failed block", n, o)
	}
	if layerwise && landed != layers {
		r.t.Errorf("chunk %d: %d layers landed, want %d", n, landed, layers)
	}
	blank := bytes.Repeat([]byte{0xa5}, pageStride)
	for plane := range planeCount {
		for id := range uint32(arenaBlocks) {
			want := blank
			for b, of := range at {
				if of == id {
					want = append(values(n, r.rank, plane, b), blank[pageBytes:]...)
				}
			}
			if !bytes.Equal(r.Page(plane, int(id)), want) {
				r.t.Fatalf("chunk %d rank %d plane %d: page %d differs", n, r.rank, plane, id)
			}
		}
	}
	return true
}

// diskUsage is what the files below a root take, as du counts it, but for the store's own, which no capacity bounds.
func diskUsage(t *testing.T, dir string) (sum int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && filepath.Dir(path) == dir && strings.HasPrefix(d.Name(), ".kvhost") {
			return filepath.SkipDir
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			sum += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return err
	})
	testenv.OK(t, err)
	return sum
}

// metric reads one series.
func metric(t *testing.T, h *host.Host, series string) (v float64) {
	t.Helper()
	for line := range strings.Lines(get(t, h, "/metrics")) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			if _, err := fmt.Sscan(rest, &v); err != nil {
				t.Fatal(err)
			}
			return v
		}
	}
	t.Fatalf("/metrics lacks %s", series)
	return 0
}

// awaitMetric waits until a series has reached a value.
func awaitMetric(t *testing.T, h *host.Host, series string, least float64) {
	t.Helper()
	testenv.Until(t, fmt.Sprintf("%s of at least %v", series, least), func() bool { return metric(t, h, series) >= least },
		func() any { return metric(t, h, series) })
}

// A host that compresses holds more than its capacity in page bytes, never takes more than it on the disk, and gives every
// byte back, whole and layer-wise, after evictions, after a restart, and when compression is off again.
func TestCompressionEndToEnd(t *testing.T) {
	testenv.Slow(t)
	c := configuration(t)
	root := c.Roots[0].Path
	const capacity = 24 << 20
	c.Roots[0].Capacity = capacity
	c.Store.Compression = config.CompressionHuffman
	testenv.OK(t, c.Validate())
	random := rand.New(rand.NewPCG(1, 2))
	const chunks = 48
	// loadAll loads what is there of all chunks, and says how many are.
	loadAll := func(two []*compressionRank) (there int) {
		for n := range chunks {
			found := two[0].load(n, n%2 == 0, random)
			if two[1].load(n, n%2 == 1, random) != found {
				t.Errorf("chunk %d is there for one rank alone", n)
			}
			if found {
				there++
			}
		}
		return there
	}

	h, two, stop := twoRanks(t, host.Config{Config: c})
	for n := range chunks {
		for _, r := range two {
			r.store(n, random)
		}
		if used := diskUsage(t, root); used > capacity {
			t.Fatalf("chunk %d: the root takes %d bytes of %d", n, used, capacity)
		}
	}
	there := loadAll(two)
	if there*chunkBytes <= capacity || there >= chunks {
		t.Errorf("%d chunks of %d bytes are there after %d stores in %d bytes", there, chunkBytes, chunks, capacity)
	}
	used := metric(t, h, `kvhost_root_used_bytes{root="`+root+`"}`)
	if ratio := float64(there*chunkBytes) / used; ratio < 1.3 {
		t.Errorf("%d chunks of %d bytes take %.0f: ratio %.3f, want 1.3", there, chunkBytes, used, ratio)
	} else {
		t.Logf("ratio %.3f by the account", ratio)
	}
	for _, way := range []string{"store", "load"} {
		label := `{direction="` + way + `",model="m"}`
		ratio := metric(t, h, "kvhost_codec_page_bytes_total"+label) / metric(t, h, "kvhost_codec_stored_bytes_total"+label)
		if ratio < 1.3 || metric(t, h, "kvhost_codec_seconds_total"+label) <= 0 {
			t.Errorf("%s: ratio %.3f by the metrics, want 1.3", way, ratio)
		}
	}
	stop()

	_, two, stop = twoRanks(t, host.Config{Config: c})
	if got := loadAll(two); got != there {
		t.Errorf("%d chunks after a restart, there were %d", got, there)
	}
	stop()

	c.Store.Compression = config.CompressionOff
	h, two, stop = twoRanks(t, host.Config{Config: c})
	defer stop()
	if got := loadAll(two); got != there {
		t.Errorf("%d chunks with compression off, there were %d", got, there)
	}
	for n := range chunks / 4 { // beside what is compressed, and in its place
		for _, r := range two {
			r.store(chunks+n, random)
		}
		if used := diskUsage(t, root); used > capacity {
			t.Fatalf("the root takes %d bytes of %d", used, capacity)
		}
	}
	for n := range chunks / 4 {
		for _, r := range two {
			if !r.load(chunks+n, n%2 == 0, random) {
				t.Errorf("chunk %d is gone", chunks+n)
			}
		}
	}
	if pages := metric(t, h, `kvhost_codec_page_bytes_total{direction="store",model="m"}`); pages != 0 {
		t.Errorf("%.0f bytes were compressed with compression off", pages)
	}
	if damaged := metric(t, h, `kvhost_root_damaged_total{root="`+root+`"}`); damaged != 0 {
		t.Errorf("%.0f files were damaged", damaged)
	}
}

// Each namespace is compressed as the first pattern that matches it says, and the others as store.compression says.
func TestCompressionByNamespace(t *testing.T) {
	c := configuration(t)
	c.Compressions = []config.Compression{
		{Namespaces: []string{"no/match", "vendor/raw*"}, Mode: config.CompressionOff},
		{Namespaces: []string{"vendor/*"}, Mode: config.CompressionHuffman},
	}
	testenv.OK(t, c.Validate())
	random := rand.New(rand.NewPCG(3, 4))
	h, _ := hosttest.Start(t, c)
	const chunks = 4
	took := map[string]int64{}
	for _, model := range []string{"vendor/raw", "vendor/a", "other"} {
		before := diskUsage(t, c.Roots[0].Path)
		var both []*compressionRank
		for rank := range ranks {
			r := dialRank(t, h, model, rank)
			for n := range chunks {
				r.store(n, random)
			}
			both = append(both, r)
		}
		took[model] = diskUsage(t, c.Roots[0].Path) - before
		for n := range 2 * chunks {
			if there := both[n%2].load(n/2, n%3 == 0, random); !there {
				t.Errorf("%s: chunk %d is gone", model, n/2)
			}
		}
		compressed := metric(t, h, `kvhost_codec_page_bytes_total{direction="store",model="`+model+`"}`)
		if want := map[bool]float64{true: chunks * chunkBytes}[model == "vendor/a"]; compressed != want {
			t.Errorf("%s: %.0f page bytes were compressed, want %.0f", model, compressed, want)
		}
	}
	for _, model := range []string{"vendor/raw", "other"} {
		if ratio := float64(took[model]) / float64(took["vendor/a"]); ratio < 1.3 {
			t.Errorf("%s takes %d bytes, vendor/a %d: ratio %.3f, want 1.3", model, took[model], took["vendor/a"], ratio)
		}
	}
}

// What is written through a root in memory is compressed on the disk behind it, and loads from there after a restart.
func TestMemoryBeforeACompressedDisk(t *testing.T) {
	c := configuration(t)
	disk := c.Roots[0].Path
	c.Roots = []config.Root{
		{Path: "memory:", Capacity: 64 << 20, Write: config.WriteThrough, Route: config.RouteAuto},
		{Path: disk, Capacity: 64 << 20, Level: 1, Route: config.RouteAuto},
	}
	c.Store.Compression = config.CompressionHuffman
	testenv.OK(t, c.Validate())
	random := rand.New(rand.NewPCG(5, 6))
	const chunks = 8
	for run := range 2 {
		h, two, stop := twoRanks(t, host.Config{Config: c})
		for rank, r := range two {
			for n := range chunks {
				if run == 0 {
					r.store(n, random)
				} else if !r.load(n, n%2 == rank, random) {
					t.Errorf("chunk %d is gone", n)
				}
			}
		}
		if run == 1 {
			if used := diskUsage(t, disk); used == 0 || used > chunks*chunkBytes*3/4 {
				t.Errorf("%d bytes on the disk of %d chunks of %d bytes", used, chunks, chunkBytes)
			}
			return
		}
		const done = `kvhost_level_moves_total{kind="through",level="1",result="done"}`
		awaitMetric(t, h, done, chunks)
		stop()
	}
}

// compressionLog keeps the lines that tell of the choice.
type compressionLog struct {
	mu    sync.Mutex
	lines []string
}

func (l *compressionLog) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if strings.Contains(string(line), "compression chosen") {
		l.lines = append(l.lines, string(line))
	}
	return len(line), nil
}

// take returns the lines since the last call.
func (l *compressionLog) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer func() { l.lines = nil }()
	return strings.Join(l.lines, "")
}

// pieceVersions counts the files of pieces below a root by the version that their headers have.
func pieceVersions(t *testing.T, dir string) map[uint32]int {
	t.Helper()
	count := map[uint32]int{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".kv") {
			return err
		}
		head, err := os.ReadFile(path)
		if err == nil {
			count[binary.LittleEndian.Uint32(head[8:])]++
		}
		return err
	})
	testenv.OK(t, err)
	return count
}

// A host with compression = "auto" compresses while the speeds of the root and of the codec say that this saves time. What
// it has chosen is in the log, in the metrics and in the status; chunks of both kinds lie beside each other, and every byte of
// them comes back, also while the choice changes during stores, and after a restart.
func TestCompressionIsChosen(t *testing.T) {
	testenv.Slow(t)
	c := configuration(t)
	root := c.Roots[0].Path
	c.Store.Compression = config.CompressionAuto
	testenv.OK(t, c.Validate())
	slow := codec.Speeds{Write: 2e8, Read: 2e8, Encode: 1e9, Decode: 1e9}
	fast := codec.Speeds{Write: 4e9, Read: 4e9, Encode: 1e9, Decode: 1e9}
	var now atomic.Pointer[codec.Speeds]
	now.Store(&codec.Speeds{})
	var turns atomic.Uint64 // 0: the speeds stay as they are
	speeds := func() codec.Speeds {
		if turns.Load() > 0 {
			now.Store([]*codec.Speeds{&slow, &fast, &slow}[turns.Add(1)%3])
		}
		return *now.Load()
	}
	var log compressionLog
	random := rand.New(rand.NewPCG(5, 6))
	cfg := host.Config{Config: c, Version: "test", Log: slog.New(slog.NewTextHandler(&log, nil)), Speeds: speeds}
	h, two, stop := twoRanks(t, cfg)
	const pages, least = `kvhost_codec_page_bytes_total{direction="store",model="m"}`, "kvhost_root_compression_least_ratio"
	stored := 0
	store := func() {
		for _, r := range two {
			r.store(stored, random)
		}
		stored++
	}
	loadAll := func() {
		for n := range stored {
			for rank, r := range two {
				if !r.load(n, (n+rank)%2 == 0, random) {
					t.Errorf("chunk %d is gone", n)
				}
			}
		}
	}

	const each = 5
	compressed := 0 // files
	for _, phase := range []struct {
		speeds     codec.Speeds
		compresses bool
		logged     string // empty: nothing
		says       string // by the status
	}{
		{slow, true, "compressed=true", "a worker writes 0.20 and reads 0.20 GB/s, and the codec's are 1.00 and 1.00 GB/s: it saves time"},
		{fast, false, "compressed=false", "a worker writes 4.00 and reads 4.00 GB/s"},
		{fast, false, "", "the codec takes longer than it saves"},
		{slow, true, "compressed=true", "it saves time from a ratio of 1."},
	} {
		now.Store(&phase.speeds)
		before := metric(t, h, pages)
		for range each {
			store()
		}
		loadAll()
		want := 0.0
		if phase.compresses {
			want = each * chunkBytes
			compressed += each * ranks
		}
		if got := metric(t, h, pages) - before; got != want {
			t.Errorf("%+v: %.0f bytes of pages were compressed, want %.0f", phase.speeds, got, want)
		}
		if got := metric(t, h, least+`{root="`+root+`"}`); math.IsInf(got, 1) == phase.compresses {
			t.Errorf("%+v: compressed from a ratio of %g on", phase.speeds, got)
		}
		if text := log.take(); strings.Count(text, "\n") != min(1, len(phase.logged)) || !strings.Contains(text, phase.logged) {
			t.Errorf("%+v: the log says %q, want %q once", phase.speeds, text, phase.logged)
		}
		if got := h.Status().Roots[0].Compression; !strings.Contains(got, phase.says) {
			t.Errorf("%+v: the status says %q, want %q", phase.speeds, got, phase.says)
		}
		if got := pieceVersions(t, root); got[2] != compressed || got[1]+got[2] != stored*ranks {
			t.Errorf("%+v: files by version: %v; want %d of version 2 and %d in all", phase.speeds, got, compressed, stored*ranks)
		}
	}

	turns.Store(1) // from here on the choice changes at any time, also between the pieces of a chunk
	for range 10 {
		store()
		for rank, r := range two {
			if n := random.IntN(stored); !r.load(n, rank == 0, random) {
				t.Errorf("chunk %d is gone", n)
			}
		}
	}
	loadAll()
	if damaged := metric(t, h, `kvhost_root_damaged_total{root="`+root+`"}`); damaged != 0 {
		t.Errorf("%.0f files were damaged", damaged)
	}
	stop()

	_, two, stop = twoRanks(t, cfg)
	defer stop()
	loadAll()
	if got := pieceVersions(t, root); got[1] == 0 || got[2] == 0 || got[1]+got[2] != stored*ranks {
		t.Errorf("files by version after a restart: %v", got)
	}
}
