package server

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/host/internal/testkit/sizestest"
	"github.com/kvhost/kvhost/host/kv"
)

var (
	sizesSeed = flag.Uint64("sizes.seed", 0, "run the history of this seed of TestSizesHistories only")
	sizesOps  = flag.Int("sizes.ops", 40, "operations of a history of TestSizesHistories")
	sizesTime = flag.Duration("sizes.time", 0, "continue TestSizesHistories with fresh seeds for so long")
)

// TestSizesHistories has engines of three sizes store, load, give up and end at random, on a root with room for half of it, of one host, of
// three that share a directory, and of three that share a bucket. Pieces are damaged, and hosts end in order or are killed. What is served is
// what was stored; what was stored is there until it is evicted or damaged; a damaged piece fails the first rank that loads its unit, and
// none before; accounts are what lies there.
func TestSizesHistories(t *testing.T) {
	testenv.Slow(t)
	tally := testenv.NewTally(t, "sizes")
	play := func(seed uint64) bool {
		h := &sizesHistory{rng: rand.New(rand.NewPCG(seed, 56)), kind: []string{"own", "directory", "bucket"}[seed%3]}
		return t.Run(fmt.Sprintf("seed=%d/%s", seed, h.kind), func(t *testing.T) {
			h.T = t
			h.run()
			tally.Add(int64(*sizesOps), int64(h.killed), 1)
		})
	}
	if *sizesSeed != 0 {
		play(*sizesSeed)
		return
	}
	for seed := range uint64(3) {
		play(seed)
	}
	testenv.FreshSeeds(*sizesTime, play)
}

const (
	sizesPrompts = 14
	sizesChunks  = sizesPrompts * sizestest.Prompt
)

// sizesHistory is a history at work.
type sizesHistory struct {
	*testing.T
	rng     *rand.Rand
	kind    string
	model   sizestest.Model
	dir     string
	bucket  *s3double.Server
	payload int64 // of a piece
	limit   int64
	sizes   []int
	hosts   []*sizesHost

	there   map[kv.Key]bool // hits after the last operation
	spoiled map[kv.Key][]spoiledPiece
	killed  int
	evicted uint64 // by hosts that have ended
	before  uint64 // evictions before the last operation
	loads   int
	failed  int
}

// sizesHost is a host with engines.
type sizesHost struct {
	*rig
	id      string
	engines []*sizestest.Engine
	proxy   *s3double.Proxy // of a bucket, or nil
}

// spoiledPiece is a byte of a piece that is wrong.
type spoiledPiece struct {
	name string
	unit int
	at   int64
	byte byte
}

func (h *sizesHistory) run() {
	h.model = []sizestest.Model{{Heads: 8, Units: 8}, {Heads: 16, Units: 8}, {Heads: 4, Units: 4}, {Heads: 2, Units: 2}}[h.rng.IntN(4)]
	h.sizes = [][]int{{1, 2, 4}, {2, 4, 8}, {1, 4, 8}}[h.rng.IntN(3)]
	h.dir, h.there, h.spoiled = filepath.Join(testenv.Dir(h), "root"), map[kv.Key]bool{}, map[kv.Key][]spoiledPiece{}
	ns := h.model.Namespace(1)
	geometry := ns.Groups[0].Geometry
	var segments []kv.Segment // one for each plane
	for i, p := range geometry.Planes {
		segments = append(segments, kv.Segment{Plane: uint32(i), Blocks: geometry.Blocks, PageLen: p.PageBytes})
	}
	plan, err := kv.NewPlan(geometry, segments)
	testenv.OK(h, err)
	h.payload, h.limit = plan.PayloadBytes(), sizesChunks/2*int64(h.model.Units)*pieceformat.FileBytes(plan)
	if h.kind == "bucket" {
		h.Setenv("AWS_ACCESS_KEY_ID", "key")
		h.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
		h.bucket = s3double.Start(h)
	}
	if h.kind == "own" {
		h.hosts = []*sizesHost{h.open("a", h.sizes...)}
	} else {
		for i, size := range h.sizes {
			h.hosts = append(h.hosts, h.open(string(rune('a'+i)), size))
		}
	}
	for op := 0; op < *sizesOps && !h.Failed(); op++ {
		h.operate()
		h.look()
	}
	for prompt := 0; prompt < sizesPrompts && !h.Failed(); prompt++ { // more than there is room for, whatever was drawn
		e, _ := h.engine()
		h.store(e, prompt)
		h.look()
	}
	if h.Failed() {
		return
	}
	h.end()
	if h.loads == 0 || h.evicted == 0 {
		h.Errorf("%d chunks were loaded and %d evicted: the history is about nothing", h.loads, h.evicted)
	}
	h.Logf("%v, %d ranks: %d chunks loaded, %d failed, %d evicted, %d kills", h.model, h.sizes, h.loads, h.failed, h.evicted, h.killed)
}

// open starts a host and its engines.
func (h *sizesHistory) open(id string, sizes ...int) *sizesHost {
	o := &sizesHost{id: id}
	o.rig = newRig(h, func(_ *Config, sc *store.Config) {
		sc.HostID, sc.Log = id, slog.New(slog.DiscardHandler)
		root := &sc.Roots[0]
		root.Path, root.Capacity = h.dir, h.limit
		if h.kind == "own" {
			return
		}
		root.Shared, root.Poll, root.Lapse = true, 10*time.Millisecond, 2*time.Second // the term of an evictor that was killed must end
		if h.kind == "bucket" {
			o.proxy = s3double.StartProxy(h, h.bucket.URL)
			root.Path, root.Traits, root.ForPieces = "s3://bucket/kv", store.Bucket, true
			fsys, err := s3fs.Open(s3fs.Config{Path: root.Path, Endpoint: o.proxy.URL, PathStyle: true, Target: pieceformat.Target, Holder: id,
				Term: time.Hour, Part: 5 << 20, Shared: true, Log: sc.Log})
			testenv.OK(h, err)
			h.Cleanup(func() { _ = fsys.Close() })
			root.FS = fsys
		}
	})
	<-o.store.ScanDone()
	for _, size := range sizes {
		o.engines = append(o.engines, sizestest.Start(h, o.socket, fmt.Sprint(size), h.model, sizestest.Draw(h.rng, size)))
	}
	return o
}

// engine draws an engine and its host.
func (h *sizesHistory) engine() (*sizestest.Engine, *sizesHost) {
	o := h.hosts[h.rng.IntN(len(h.hosts))]
	return o.engines[h.rng.IntN(len(o.engines))], o
}

// prompt draws a prompt, the first ones more often.
func (h *sizesHistory) prompt() int { return min(h.rng.IntN(sizesPrompts), h.rng.IntN(sizesPrompts)) }

// operate does one thing.
func (h *sizesHistory) operate() {
	e, o := h.engine()
	switch n := h.rng.IntN(20); {
	case n < 6:
		h.store(e, h.prompt())
	case n < 12:
		h.load(e, h.prompt())
	case n < 14:
		h.rush()
	case n < 16:
		h.giveUp(e, h.prompt())
	case n < 18:
		h.spoil()
	default:
		h.restart(o, h.rng.IntN(2) == 0)
	}
}

// store stores a prompt. There is room for it, or what is less recent goes.
func (h *sizesHistory) store(e *sizestest.Engine, prompt int) {
	results, err := e.Store(prompt)
	testenv.OK(h, err)
	for rank, chunks := range results {
		for chunk, c := range chunks {
			switch {
			case c.Result == client.Stored, c.Result == client.Resident:
			case h.kind != "own": // there is no room yet, or a damaged file has the name still, or the host was given up while it stood still
			default:
				h.Errorf("%s: rank %d: chunk %d of prompt %d %s: %v", e, rank, chunk, prompt, c.Result, c.Err)
			}
		}
	}
}

// load loads what is there of a prompt.
func (h *sizesHistory) load(e *sizestest.Engine, prompt int) {
	found, err := e.Look(prompt)
	testenv.OK(h, err)
	if found.Hits() == 0 {
		return
	}
	bad := make([][]spoiledPiece, sizestest.Prompt)
	for chunk := range bad {
		bad[chunk] = h.stillBad(sizestest.Key(prompt, chunk))
	}
	failed, err := e.Load(prompt, found)
	testenv.NoError(h, err)
	h.loads += found.Hits()
	seen := map[int]bool{}
	for _, f := range failed { // in the order of the loads
		first := !seen[f.Chunk]
		seen[f.Chunk] = true
		switch {
		case h.kind != "own": // others may have removed it, or given the host up
		case len(bad[f.Chunk]) == 0:
			h.Errorf("%s: rank %d has not got chunk %d of prompt %d, which is not damaged", e, f.Rank, f.Chunk, prompt)
		case first && !h.needs(e, f.Rank, bad[f.Chunk]):
			h.Errorf("%s: rank %d has not got chunk %d of prompt %d, of which its units are not damaged", e, f.Rank, f.Chunk, prompt)
		}
	}
	for chunk := range found.Hits() {
		if seen[chunk] {
			h.failed++
			if there, err := e.Has(prompt, chunk); err != nil || there && h.kind == "own" {
				h.Errorf("%s: chunk %d of prompt %d is a hit after a load failed, error %v", e, chunk, prompt, err)
			}
		}
		if h.kind == "own" && len(bad[chunk]) > 0 && !seen[chunk] {
			h.Errorf("%s: chunk %d of prompt %d is loaded, and damaged: %v", e, chunk, prompt, bad[chunk])
		}
	}
}

// needs says whether a rank has one of the damaged units.
func (h *sizesHistory) needs(e *sizestest.Engine, rank int, bad []spoiledPiece) bool {
	for _, p := range bad {
		if h.model.Has(e.Tensor, rank, p.unit) {
			return true
		}
	}
	return false
}

// rush has one engine of each size store the same prompt, and load others, at the same time.
func (h *sizesHistory) rush() {
	prompt := h.prompt()
	var all sync.WaitGroup
	for _, o := range h.hosts {
		for _, e := range o.engines {
			all.Go(func() {
				_, err := e.Store(prompt)
				testenv.NoError(h, err)
				other := e.Rand.IntN(sizesPrompts)
				found, err := e.Look(other)
				if testenv.NoError(h, err); err != nil || found.Hits() == 0 {
					return
				}
				failed, err := e.Load(other, found)
				testenv.NoError(h, err)
				for _, f := range failed {
					if h.kind == "own" && h.spoiled[sizestest.Key(other, f.Chunk)] == nil {
						h.Errorf("%s: rank %d has not got chunk %d of prompt %d, which was never damaged", e, f.Rank, f.Chunk, other)
					}
				}
			})
		}
	}
	all.Wait()
}

// giveUp begins to store a prompt, and has some of the ranks take it back, or the engine end.
func (h *sizesHistory) giveUp(e *sizestest.Engine, prompt int) {
	jobs, err := e.StoreJobs(prompt)
	testenv.OK(h, err)
	if h.rng.IntN(3) == 0 {
		h.renew(e)
		return
	}
	for _, job := range jobs {
		if h.rng.IntN(2) == 0 {
			testenv.OK(h, job.Cancel(h.Context()))
		}
	}
	for _, job := range jobs {
		_, err := job.Published(h.Context())
		testenv.OK(h, err)
	}
}

// renew ends an engine, and starts one of its size.
func (h *sizesHistory) renew(e *sizestest.Engine) {
	for _, o := range h.hosts {
		for i := range o.engines {
			if o.engines[i] == e {
				e.Close()
				testenv.Until(h, "the host has seen the engine's end", func() bool { // or it is still the same engine
					for _, s := range o.server.Status().SessionList {
						if s.Engine == fmt.Sprint(e.Tensor) {
							return false
						}
					}
					return true
				})
				o.engines[i] = sizestest.Start(h, o.socket, fmt.Sprint(e.Tensor), h.model, sizestest.Draw(h.rng, e.Tensor))
			}
		}
	}
}

// spoil changes a byte of a piece's payload behind the stores' back.
func (h *sizesHistory) spoil() {
	images := h.images()
	if len(images) == 0 {
		return
	}
	image := images[h.rng.IntN(len(images))]
	b, err := image.read()
	if errors.Is(err, fs.ErrNotExist) {
		return // it was just evicted
	}
	testenv.OK(h, err)
	head, err := pieceformat.DecodeHeader(b)
	testenv.OK(h, err)
	at := int64(len(b)) - 1 - h.rng.Int64N(h.payload)
	p := spoiledPiece{name: image.name, unit: int(head.Rank), at: at, byte: b[at] ^ byte(1+h.rng.IntN(255))}
	for _, old := range h.spoiled[head.Key] {
		if old.name == p.name && old.at == p.at {
			return // it might become right
		}
	}
	b[at] = p.byte
	h.spoiled[head.Key] = append(h.spoiled[head.Key], p)
	if h.bucket != nil {
		h.bucket.Set(image.name, b)
		return
	}
	f, err := os.OpenFile(image.name, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	testenv.OK(h, err)
	_, err = f.WriteAt(b[at:][:1], at)
	testenv.OK(h, errors.Join(err, f.Close()))
}

// stillBad is what is damaged of a chunk now.
func (h *sizesHistory) stillBad(key kv.Key) (list []spoiledPiece) {
	for _, p := range h.spoiled[key] {
		if b, err := (pieceImage{h, p.name}).read(); err == nil && p.at < int64(len(b)) && b[p.at] == p.byte {
			if head, err := pieceformat.DecodeHeader(b); err == nil && head.Key == key {
				list = append(list, p)
			}
		}
	}
	return list
}

// restart ends a host, and starts it again with engines of other shapes.
func (h *sizesHistory) restart(o *sizesHost, kill bool) {
	var sizes []int
	for _, e := range o.engines {
		sizes = append(sizes, e.Tensor)
		e.Close()
	}
	h.close(o, kill)
	*o = *h.open(o.id, sizes...)
}

// close ends a host.
func (h *sizesHistory) close(o *sizesHost, kill bool) {
	if h.evicted += o.store.Stats().Roots[0].Evictions; !kill {
		o.end()
		return
	}
	h.killed++
	if o.proxy != nil { // all but the lock, which the next life would wait for
		o.proxy.Set(s3double.Rule{In: "/lock."}, s3double.Rule{Fault: s3double.Denied})
	}
	o.kill()
}

// look compares what is there with what was before the operation, and accounts with the disk. Among hosts of one root others evict and
// remove at any time.
func (h *sizesHistory) look() {
	if h.kind != "own" {
		for _, o := range h.hosts {
			testenv.OK(h, o.store.Inspect(nil))
		}
		return
	}
	o := h.hosts[0]
	now := h.present(o)
	gone := 0
	for key := range h.there {
		if !now[key] && h.spoiled[key] == nil {
			gone++
		}
	}
	evictions := h.evicted + o.store.Stats().Roots[0].Evictions
	if uint64(gone) > evictions-h.before {
		h.Errorf("%d chunks went in one operation, in which %d were evicted", gone, evictions-h.before)
	}
	h.before = evictions
	for key := range h.spoiled {
		if !now[key] && len(h.stillBad(key)) == 0 {
			delete(h.spoiled, key)
		}
	}
	h.there = now
	h.compare(o)
}

// present is the chunks that are hits for every engine of a host.
func (h *sizesHistory) present(o *sizesHost) map[kv.Key]bool {
	list, agreed := h.found(o)
	if !agreed {
		h.Errorf("the engines of %s find different chunks", o.id)
	}
	return list
}

// found returns the chunks that the first engine of a host finds, and whether the others find the same.
func (h *sizesHistory) found(o *sizesHost) (list map[kv.Key]bool, agreed bool) {
	list, agreed = map[kv.Key]bool{}, true
	for prompt := range sizesPrompts {
		for chunk := range sizestest.Prompt {
			for i, e := range o.engines {
				there, err := e.Has(prompt, chunk)
				testenv.OK(h, err)
				if key := sizestest.Key(prompt, chunk); i > 0 && there != list[key] {
					agreed = false
				} else if there {
					list[key] = true
				}
			}
		}
	}
	return list, agreed
}

// compare compares the account of an own root with the disk.
func (h *sizesHistory) compare(o *sizesHost) {
	var was string
	testenv.Until(h, "the account is what the disk has", func() (same bool) {
		testenv.OK(h, o.store.Inspect(func(list []store.Inspection) {
			disk := h.bytes()
			was = fmt.Sprintf("the account says %d of %d, the disk %d, %d are missing", list[0].Used, h.limit, disk, list[0].Missing)
			same = list[0].Used == disk+list[0].Missing && list[0].Used <= h.limit
		}))
		return same && o.store.Stats().Roots[0].Orphaned == 0
	}, func() any { return was })
}

// end closes all hosts, and has one more find what is there: for engines of all sizes.
func (h *sizesHistory) end() {
	for _, o := range h.hosts {
		for _, e := range o.engines {
			e.Close()
		}
		h.close(o, false)
	}
	before := h.bytes()
	o := h.open("z", h.sizes...)
	if h.kind == "own" {
		h.compare(o)
	} else {
		testenv.Until(h, "the next evictor's account is what is there, within the capacity", func() bool {
			st, in := o.store.Stats().Roots[0], h.bytes()
			return st.Shared.Evictor && st.Used == in && in <= h.limit
		}, func() any { return fmt.Sprintf("%+v, %d there", o.store.Stats().Roots[0], h.bytes()) })
	}
	var now, whole map[kv.Key]bool
	testenv.Until(h, "the hits of each engine are the chunks with all pieces", func() bool { // an evictor that has just begun may make room
		var agreed bool
		whole = h.whole()
		now, agreed = h.found(o)
		return agreed && maps.Equal(now, whole)
	}, func() any { return fmt.Sprintf("hits %v, whole %v", now, whole) })
	if after := h.bytes(); after < before-h.limit/3 {
		h.Errorf("%d bytes are left of %d, want the room of members that are gone reserved without the loss of all", after, before)
	}
	for prompt := range sizesPrompts {
		for _, e := range o.engines {
			h.load(e, prompt)
		}
	}
}

// pieceImage is a piece where it lies.
type pieceImage struct {
	h    *sizesHistory
	name string
}

func (p pieceImage) read() ([]byte, error) {
	if p.h.bucket == nil {
		return os.ReadFile(p.name)
	}
	o, ok := p.h.bucket.Objects()[p.name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return append([]byte(nil), o.Body...), nil
}

// images are the pieces that are there.
func (h *sizesHistory) images() (list []pieceImage) {
	if h.bucket != nil {
		for name := range h.bucket.Objects() {
			if strings.HasSuffix(name, ".kv") && !strings.Contains(name, "/.") {
				list = append(list, pieceImage{h, name})
			}
		}
	} else {
		h.files(func(path string, own bool, _ int64) {
			if !own {
				list = append(list, pieceImage{h, path})
			}
		})
	}
	return list
}

// files visits all files of a root but for what is the store's own. Those in quarantine are its own, and count.
func (h *sizesHistory) files(visit func(path string, own bool, bytes int64)) {
	testenv.OK(h, filepath.WalkDir(h.dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // just removed
		}
		if err != nil || d.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(h.dir, path)
		kept := strings.HasPrefix(rel, pieceformat.QuarantineDir)
		if own := strings.HasPrefix(rel, pieceformat.MetaDir); own && !kept {
			return nil
		}
		if info, err := d.Info(); err == nil {
			visit(path, kept, pieceformat.Padded(info.Size()))
		}
		return nil
	}))
}

// bytes is what all pieces take.
func (h *sizesHistory) bytes() (sum int64) {
	if h.bucket != nil {
		for _, p := range h.images() {
			sum += int64(len(h.bucket.Objects()[p.name].Body))
		}
		return sum
	}
	h.files(func(_ string, _ bool, bytes int64) { sum += bytes })
	return sum
}

// whole is the chunks of which all pieces are there.
func (h *sizesHistory) whole() map[kv.Key]bool {
	units := map[kv.Key]uint64{}
	for _, p := range h.images() {
		if b, err := p.read(); err == nil {
			head, err := pieceformat.DecodeHeader(b)
			testenv.OK(h, err)
			units[head.Key] |= 1 << head.Rank
		}
	}
	return h.model.Whole(units)
}
