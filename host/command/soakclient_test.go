package command

import (
	"context"
	"crypto/sha256"
	endian "encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/trace"
	"github.com/kvhost/kvhost/host/kv"
)

// The honest engine: two ranks, whose requests continue some of its conversations, each at its own speed.
const (
	honestTenant  = 1
	honestRanks   = 2
	honestLayers  = 4
	honestParts   = 2
	honestPage    = 4096
	honestBlocks  = 2  // of a chunk
	honestWindow  = 24 // chunks that a rank's memory holds
	conversations = 40
	longestPrefix = 8 // chunks, after which a conversation ends and another begins
	honestPause   = 30 * time.Millisecond
)

// honestOps are what is measured, in the order of honestEngine.times.
var honestOps = []string{"lookup", "load", "store"}

// honestEngine is the engine whose times are measured. What it stores follows from key, rank, plane, block and offset; what
// it loads is compared whole, in memory that was poisoned before. One goroutine runs it.
type honestEngine struct {
	ranks []*honestRank
	rng   *rand.Rand // the same for each host
	times [3]*trace.Histogram
	turn  [conversations]int

	requests         uint32
	keys, hits, lost int64
	stored, refused  int64
	compared, wrong  int64
	why              map[string]int // by result: chunks that a rank could not store
}

type honestRank struct {
	number  uint32
	session *client.Session
	arena   *client.Arena
	planes  []client.PlaneRegion
	order   []uint32 // ids of blocks, shuffled before each use
	took    [3]time.Duration
	wrong   int64
	lost    map[int]bool
}

func newHonestEngine(ctx context.Context, socket string) (*honestEngine, error) {
	e := &honestEngine{rng: rand.New(rand.NewPCG(1, 2)), why: map[string]int{}}
	for i := range e.times {
		e.times[i] = trace.NewHistogram(7)
	}
	space := kv.Namespace{
		Model: "honest/model", DType: "bf16", Engine: "soak", HashAlgorithm: "sha256", KeyBytes: 32, TokensPerBlock: 16,
		TensorParallel: honestRanks,
		Groups:         []kv.Group{{Geometry: kv.Uniform(honestBlocks, honestLayers, honestParts, honestPage)}},
	}
	for r := range uint32(honestRanks) {
		x := &honestRank{number: r}
		var err error
		x.session, err = client.Dial(ctx, client.Hello{
			Socket: socket, Engine: "honest", Rank: r, LocalRanks: honestRanks, Namespace: space, Tenant: honestTenant,
		})
		if err != nil {
			return nil, err
		}
		const blocks, plane = honestWindow * honestBlocks, honestWindow * honestBlocks * honestPage
		if x.arena, err = x.session.NewArena(honestLayers * honestParts * plane); err != nil {
			return nil, err
		}
		for p := range int64(honestLayers * honestParts) {
			x.planes = append(x.planes, client.PlaneRegion{Offset: p * plane, Stride: honestPage, Blocks: blocks})
		}
		if _, err := x.session.Register(ctx, 0, x.arena, x.planes); err != nil {
			return nil, err
		}
		for id := range uint32(blocks) {
			x.order = append(x.order, id)
		}
		e.ranks = append(e.ranks, x)
	}
	return e, nil
}

func (e *honestEngine) close() {
	for _, x := range e.ranks {
		x.session.Close()
		x.arena.Close()
	}
}

func (e *honestEngine) operations() int64 {
	return int64(e.times[0].Count() + e.times[1].Count() + e.times[2].Count())
}

func (e *honestEngine) share() float64 { return float64(e.hits) / float64(max(1, e.keys)) }

// request continues a conversation by a chunk: what is there is loaded and compared, the rest stored.
func (e *honestEngine) request(ctx context.Context) error {
	u := e.rng.Float64()
	c := int(u * u * conversations)
	e.turn[c]++
	e.requests++
	keys := make([]kv.Key, (e.turn[c]-1)%longestPrefix+1)
	for i := range keys {
		keys[i] = sha256.Sum256(fmt.Appendf(nil, "conversation %d, life %d, chunk %d", c, (e.turn[c]-1)/longestPrefix, i))
	}
	for _, x := range e.ranks {
		e.rng.Shuffle(len(x.order), func(i, j int) { x.order[i], x.order[j] = x.order[j], x.order[i] })
	}
	start := time.Now()
	found, err := e.ranks[0].session.Lookup(ctx, client.LookupRequest{Request: e.requests, Keys: keys, Readers: 1<<honestRanks - 1})
	if err != nil {
		return fmt.Errorf("lookup: %w", err)
	}
	e.times[0].Record(uint64(time.Since(start)))
	hits := found.Hits()
	if hits > len(keys) {
		return fmt.Errorf("%d hits of %d keys", hits, len(keys))
	}
	e.keys, e.hits = e.keys+int64(len(keys)), e.hits+int64(hits)
	var again []int
	if hits > 0 {
		if err := e.each(func(x *honestRank) error { return x.load(ctx, found, keys[:hits]) }); err != nil {
			return err
		}
		for _, x := range e.ranks {
			e.times[1].Record(uint64(x.took[1]))
			e.wrong, e.compared = e.wrong+x.wrong, e.compared+int64(hits-len(x.lost))*honestBlocks*honestLayers*honestParts*honestPage
		}
		for i := range hits {
			if e.ranks[0].lost[i] || e.ranks[1].lost[i] {
				again = append(again, i)
			}
		}
		e.lost += int64(len(again))
	}
	for i := hits; i < len(keys); i++ {
		again = append(again, i)
	}
	if len(again) > 0 {
		results := make([]client.StoreResult, honestRanks)
		err := e.each(func(x *honestRank) (err error) {
			results[x.number], err = x.store(ctx, e.requests, keys, again)
			return err
		})
		if err != nil {
			return err
		}
		for i := range again {
			if good(results[0].Chunks[i].Result) && good(results[1].Chunks[i].Result) {
				e.stored++
			} else {
				e.refused++
				for _, r := range results {
					if c := r.Chunks[i]; !good(c.Result) {
						e.why[fmt.Sprintf("%s %v", c.Result, c.Err)]++
					}
				}
			}
		}
		for _, x := range e.ranks {
			e.times[2].Record(uint64(x.took[2]))
		}
	}
	return e.each(func(x *honestRank) error { return x.session.EndRequest(ctx, e.requests, client.Hints{}) })
}

func good(r client.Result) bool { return r == client.Stored || r == client.Resident }

// each calls do for all ranks at once.
func (e *honestEngine) each(do func(*honestRank) error) error {
	errs := make([]error, len(e.ranks))
	var all sync.WaitGroup
	for i, x := range e.ranks {
		all.Go(func() {
			if err := do(x); err != nil {
				errs[i] = fmt.Errorf("rank %d: %w", i, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func (x *honestRank) load(ctx context.Context, found *client.Lookup, keys []kv.Key) error {
	lease := found
	if x.number > 0 {
		lease = x.session.Leased(0, found.Lease())
	}
	chunks := make([]client.LoadChunk, len(keys))
	for i := range chunks {
		chunks[i] = client.LoadChunk{Index: i, Blocks: x.blocks(i)}
	}
	poisoned := func(page []byte, _ uint64) { copy(page, poisonedPage) }
	for i := range keys {
		x.pages(&keys[i], i, poisoned)
	}
	start := time.Now()
	job, err := x.session.Load(ctx, lease, chunks, client.LoadOptions{})
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	result, err := job.Wait(ctx)
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	x.took[1] = time.Since(start)
	x.lost, x.wrong = map[int]bool{}, 0
	for _, f := range result.Failed {
		x.lost[f.Chunk] = true
	}
	for i := range keys {
		if !x.lost[i] {
			x.pages(&keys[i], i, func(page []byte, seed uint64) { x.wrong += wrongBytes(page, seed) })
		}
	}
	return nil
}

func (x *honestRank) store(ctx context.Context, request uint32, keys []kv.Key, which []int) (client.StoreResult, error) {
	chunks := make([]client.StoreChunk, len(which))
	for at, i := range which {
		x.pages(&keys[i], at, writePage)
		chunks[at] = client.StoreChunk{Key: keys[i], Depth: uint32(i), Blocks: x.blocks(at)}
		if i > 0 {
			chunks[at].Parent = keys[i-1]
		}
	}
	start := time.Now()
	job, err := x.session.Store(ctx, request, 0, chunks)
	if err != nil {
		return client.StoreResult{}, fmt.Errorf("store: %w", err)
	}
	result, err := job.Published(ctx)
	x.took[2] = time.Since(start)
	return result, err
}

// blocks are the ids of the i-th chunk of a message.
func (x *honestRank) blocks(i int) []uint32 { return x.order[i*honestBlocks : (i+1)*honestBlocks] }

// pages visits the pages of the i-th chunk of a message, each with the seed of what belongs there.
func (x *honestRank) pages(key *kv.Key, i int, visit func(page []byte, seed uint64)) {
	for p, r := range x.planes {
		for b, id := range x.blocks(i) {
			at := r.Offset + int64(id)*r.Stride
			visit(x.arena.Bytes()[at:at+honestPage], pageSeed(key, x.number, p, b))
		}
	}
}

var poisonedPage = func() []byte {
	p := make([]byte, honestPage)
	for i := range p {
		p[i] = 0xd5
	}
	return p
}()

func pageSeed(key *kv.Key, rank uint32, plane, block int) uint64 {
	return endian.LittleEndian.Uint64(key[:]) ^ (uint64(rank)<<40|uint64(plane)<<20|uint64(block))*0x9e3779b97f4a7c15
}

// wordAt is the n-th 8 bytes of a page.
func wordAt(seed uint64, n int) uint64 {
	z := seed + uint64(n+1)*0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	return z ^ z>>27
}

func writePage(page []byte, seed uint64) {
	for n := range len(page) / 8 {
		endian.LittleEndian.PutUint64(page[8*n:], wordAt(seed, n))
	}
}

func wrongBytes(page []byte, seed uint64) (wrong int64) {
	for n := range len(page) / 8 {
		for diff := endian.LittleEndian.Uint64(page[8*n:]) ^ wordAt(seed, n); diff != 0; diff >>= 8 {
			if diff&0xff != 0 {
				wrong++
			}
		}
	}
	return wrong
}
