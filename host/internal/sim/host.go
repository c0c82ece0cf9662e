package sim

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// host is a simulated host with levels: a real store on file systems of sizes, and a clock that the simulation sets. It plays one request at a
// time, like one engine: it looks the chunks up, loads what was granted, and stores the rest. Each takes as long as the level needs
// for so many bytes, and the copies between levels are made meanwhile. They pause while a request loads.
//
// A piece has the smallest size that there is, whatever the chunk's: all that the store decides depends on how many fit.
type host struct {
	g     *LevelGrid
	w     *Workload
	cfg   store.Config
	store *store.Store
	text  kv.Namespace
	ns    *catalog.Namespace
	print kv.Printer
	piece []byte // image of a new piece; its payload is zeros
	table []uint64

	now    time.Duration // since the start of the trace
	levels []simLevel
	copies []runningCopy // under way
	paid   time.Duration // when the bandwidth of copies allows the next one
	failed firstError

	number  uint32   // of the request
	keys    []kv.Key // of its chunks
	loaded  []int    // by level: its chunks that were loaded there
	times   *levelTimes
	hits    int
	refused int
}

type simLevel struct {
	fs      *sizes
	path    string
	copying int           // workers that make copies to or from it, where it is the farther level
	free    time.Duration // when it has moved the bytes of all copies so far
	figures LevelFigures
}

// runningCopy is a copy that a worker makes.
type runningCopy struct {
	level int // whose worker it is
	ends  time.Duration
	end   func()
}

// payload is the size of a piece's pages.
const payload = pieceformat.Page

// open starts a host with an instance of the evict policy for each level. A policy that places makes all levels equally near.
func (g *LevelGrid) open(ctx context.Context, w *Workload, p *Policy, a *Policy, write store.Write) (h *host, err error) {
	h = &host{g: g, w: w, levels: make([]simLevel, len(g.Levels)), loaded: make([]int, len(g.Levels)), times: newLevelTimes(g)}
	h.text = kv.Namespace{
		Model: w.Name, DType: "u8", Engine: "kvhost-sim", HashAlgorithm: "trace", KeyBytes: 8, TensorParallel: 1, TokensPerBlock: max(1, g.Options.Prefill.ChunkTokens),
		Groups: []kv.Group{{Lookup: kv.ByPrefix, Geometry: kv.Uniform(1, 1, 1, payload)}},
	}
	admit := g.handle(a)
	if admit != nil {
		admit.Levels, admit.Observe = 1<<len(g.Levels)-1, h.observer()
	}
	h.cfg = store.Config{
		Stepped: true, HostID: "sim", Seed: g.Options.Seed, Now: h.time, Log: slog.New(&h.failed), IOTimeout: -1, ScanWait: time.Hour,
		Moves: store.Moves{Workers: g.Workers},
	}
	if h.cfg.Policies.Admit = admit; a.Role == abi.RolePlace {
		h.cfg.Policies.Admit, h.cfg.Policies.Place = nil, admit
	}
	entry := pieceformat.DataOffset(1, false) + payload
	for n, l := range g.Levels {
		capacity, err := l.Capacity.Chunks(w, g.ChunkBytes)
		if err != nil {
			return nil, fmt.Errorf("%w (level %d)", err, n)
		}
		evicts := p
		if l.Policy != nil {
			evicts = l.Policy
		}
		capacity = min(capacity, len(w.keys))
		h.levels[n] = simLevel{
			fs:   &sizes{files: map[string]*sized{}, removed: func(name string) { h.evicted(n, name) }},
			path: fmt.Sprintf("/%d", n), figures: LevelFigures{Level: n, Capacity: capacity},
		}
		r := store.RootConfig{
			Path: h.levels[n].path, Level: n, Capacity: int64(capacity) * entry, MaxEntries: uint32(capacity), ForPieces: true,
			Medium: store.Medium{FS: h.levels[n].fs, Traits: store.Traits{NoDirectory: true, WriteOnce: true}},
			Write:  write, Evict: g.handle(evicts),
		}
		if r.Volatile = n == 0; a.Role == abi.RolePlace {
			r.Volatile, r.Level = false, 0
		}
		h.cfg.Roots = append(h.cfg.Roots, r)
	}
	if h.store, err = store.Open(ctx, h.cfg); err != nil {
		return nil, err
	}
	if h.ns, err = h.store.Namespace(ctx, &h.text); err != nil {
		return nil, errors.Join(err, h.close())
	}
	h.print = kv.PrinterOf(h.ns.Digest, 0)
	h.piece, h.table = make([]byte, entry), []uint64{kv.Sum(make([]byte, payload))}
	return h, nil
}

// handle returns a policy for a store, which borrows it; nil for the store's own.
func (g *LevelGrid) handle(p *Policy) *policy.Handle {
	if p.module == nil {
		return nil
	}
	return policy.NewHandle(p.module, p.Text, p.config, nil)
}

func (h *host) close() error { return h.store.Close() }

// time is the clock of the store.
func (h *host) time() time.Time { return time.Unix(1, 0).Add(h.now) }

// takes is how long so many chunks take at a speed in bytes a second.
func (h *host) takes(chunks int, speed float64) time.Duration {
	return time.Duration(float64(chunks) * float64(h.g.ChunkBytes) / speed * float64(time.Second))
}

// until advances the clock, and makes the copies that end meanwhile.
func (h *host) until(ctx context.Context, to time.Duration) {
	for h.copy(ctx); len(h.copies) > 0 && h.copies[0].ends <= to; h.copy(ctx) {
		next := h.copies[0]
		h.copies = slices.Delete(h.copies, 0, 1)
		h.now = max(h.now, next.ends)
		h.levels[next.level].copying--
		next.end()
	}
	h.now = max(h.now, to)
}

// copy has idle workers begin the copies that wait. A level moves the bytes of one copy after the other.
func (h *host) copy(ctx context.Context) {
	for n := 1; n < len(h.levels); n++ {
		for h.levels[n].copying < h.g.Workers {
			e, copied, end := h.store.Step(ctx, n)
			if e == nil {
				break
			}
			if copied == 0 { // it was not wanted any more, or found no room
				end()
				continue
			}
			l, cost := &h.levels[n], h.g.Levels
			l.copying++
			l.free = max(l.free, h.now) + h.takes(1, min(cost[e.From.Level].BytesPerSecond, cost[e.To.Number()].BytesPerSecond))
			if h.g.Bandwidth > 0 {
				h.paid = max(h.paid, h.now) + h.takes(1, float64(h.g.Bandwidth))
			}
			h.copies = append(h.copies, runningCopy{n, max(l.free+cost[n].Latency, h.paid), end})
			slices.SortStableFunc(h.copies, func(a, b runningCopy) int { return cmp.Compare(a.ends, b.ends) })
		}
	}
}

// pause advances the clock by the time of a load. Copies wait for that time.
func (h *host) pause(d time.Duration) {
	for i := range h.copies {
		h.copies[i].ends += d
	}
	for n := range h.levels {
		h.levels[n].free += d
	}
	h.now, h.paid = h.now+d, h.paid+d
}

// request looks up one request's chunks, loads the resident prefix, stores what is missing, and ends the request. It returns the length of
// the prefix.
func (h *host) request(ctx context.Context, ids []uint32, number uint32) (prefix int, err error) {
	h.until(ctx, time.Duration(h.w.times[number-1]))
	h.number, h.keys = number, h.keys[:0]
	for _, id := range ids {
		var k kv.Key
		binary.LittleEndian.PutUint64(k[:], h.w.keys[id])
		h.keys = append(h.keys, k)
	}
	lease, err := h.store.Lookup(store.LookupRequest{Namespace: h.ns, Keys: h.keys, Request: number})
	if err != nil {
		return 0, err
	}
	prefix = lease.Hits()
	if err = h.load(lease); err != nil {
		return 0, err
	}
	h.hits += prefix
	for i := prefix; i < len(ids) && err == nil; i++ {
		h.copy(ctx)
		err = h.put(ctx, ids, i)
	}
	h.store.EndRequest(number, h.w.hints[number-1])
	return prefix, errors.Join(err, h.failed.err)
}

// load loads what was granted, and ends the lease.
func (h *host) load(lease *store.Lease) error {
	defer lease.Release()
	clear(h.loaded)
	for i := range lease.Hits() {
		lease.Approach(i)
		n := h.levelOf(lease.Root(i))
		h.loaded[n]++
		if err := h.loadPiece(lease, i); err != nil {
			return err
		}
	}
	for n, chunks := range h.loaded {
		if chunks > 0 {
			h.levels[n].figures.Hits += chunks
			h.pause(h.g.Levels[n].Latency + h.takes(chunks, h.g.Levels[n].BytesPerSecond))
		}
	}
	h.times.add(h.loaded)
	return nil
}

func (h *host) loadPiece(lease *store.Lease, i int) error {
	p, err := lease.Open(i, 0)
	if err != nil {
		return err
	}
	defer p.Close()
	image := make([]byte, len(h.piece))
	if _, err = p.File().ReadAt(image, 0); err != nil {
		return err
	}
	head, err := p.Verify(image)
	if err == nil {
		p.Keep(0, 1, image[head.DataOffset:], 0)
	}
	return err
}

// levelOf is the level of a root.
func (h *host) levelOf(path string) int {
	return slices.IndexFunc(h.levels, func(l simLevel) bool { return l.path == path })
}

// put stores a chunk of the request in the nearest level that takes it.
func (h *host) put(ctx context.Context, ids []uint32, i int) error {
	q := store.PutRequest{Namespace: h.ns, Key: h.keys[i], Depth: uint32(i), Request: h.number, Continued: i+1 < len(ids)}
	if i > 0 {
		q.Parent = h.keys[i-1]
	}
	if h.store.Has(h.print.Print(&q.Key)) {
		h.hits++
	}
	p, err := h.store.Put(ctx, q)
	switch {
	case errors.Is(err, store.ErrResident), errors.Is(err, store.ErrNoSpace):
		return nil
	case errors.Is(err, store.ErrRefused):
		h.refused++
		return nil
	case err != nil:
		return err
	}
	n := h.levelOf(p.Root())
	h.levels[n].figures.New++
	p.Head(h.piece, h.table)
	f, err := p.File()
	if err == nil {
		_, err = f.WriteAt(h.piece, 0)
	}
	if err != nil {
		p.Abort(err)
		return err
	}
	h.until(ctx, h.now+h.takes(1, h.g.Levels[n].BytesPerSecond))
	if err := p.Publish(ctx); !errors.Is(err, store.ErrGone) {
		return err
	}
	return nil
}

// evicted counts a piece that a level removes.
func (h *host) evicted(n int, name string) {
	if strings.Contains(name, "/.") { // a temporary, or a file of the store's own
		return
	}
	if n+1 < len(h.levels) {
		next := &h.levels[n+1]
		if _, err := next.fs.Stat(next.path + strings.TrimPrefix(name, h.levels[n].path)); err == nil {
			h.levels[n].figures.Covered++
			return
		}
	}
	h.levels[n].figures.Drops++
}

// observer gets the calls of the admit or place policy, with chunks as they are in the trace; nil if they are not wanted.
func (h *host) observer() policy.Observer {
	observe := h.g.Options.Observe
	if observe == nil {
		return nil
	}
	keys := map[uint64]uint64{}
	return func(c *policy.Call) error {
		if len(keys) == 0 {
			for _, key := range h.w.keys {
				var k kv.Key
				binary.LittleEndian.PutUint64(k[:], key)
				keys[h.print.Print(&k)] = key
			}
		}
		call := *c
		call.Candidates = slices.Clone(c.Candidates)
		for i := range call.Candidates {
			x := &call.Candidates[i]
			x.Key, x.ParentKey = keys[x.Key], keys[x.ParentKey]
		}
		if q := c.Query; q != nil {
			call.Candidates = []abi.Candidate{{
				Key: binary.LittleEndian.Uint64(q.Key[:]), From: abi.NoLevel, Request: h.number, Time: uint64(h.now),
				Depth: uint32(slices.Index(h.keys, q.Key)),
			}}
		}
		if h.failed.err == nil {
			h.failed.err = observe(&call)
		}
		return h.failed.err
	}
}

// firstError is a log of which the first error ends the simulation.
type firstError struct{ err error }

func (*firstError) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelError }
func (e *firstError) WithAttrs([]slog.Attr) slog.Handler         { return e }
func (e *firstError) WithGroup(string) slog.Handler              { return e }
func (e *firstError) Handle(_ context.Context, r slog.Record) error {
	if e.err != nil {
		return nil
	}
	e.err = errors.New(r.Message)
	r.Attrs(func(a slog.Attr) bool {
		if cause, is := a.Value.Any().(error); is {
			e.err = fmt.Errorf("%s: %w", r.Message, cause)
		}
		return true
	})
	return nil
}
