// Package sizestest has engines of several tensor-parallel sizes with one model, each with a session and pages of its own for every rank.
package sizestest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// The shape of a chunk, and how many a prompt has.
const (
	Tokens    = 256
	Layers    = 2
	parts     = 2
	headBytes = 24 // of a token, not a power of two
	Prompt    = 3
)

const poison = 0xa5

// Model is what engines of all sizes have in common.
type Model struct{ Heads, Units int }

// Namespace is that of an engine with so many ranks.
func (m Model) Namespace(tensor int) kv.Namespace {
	return kv.Namespace{
		Model: "test", DType: "bf16", Engine: "test", HashAlgorithm: "sha256", KeyBytes: 32,
		TokensPerBlock: 1, TensorParallel: tensor, Units: m.Units,
		Groups: []kv.Group{{Geometry: kv.Uniform(Tokens, Layers, uint32(parts*m.Heads/m.Units), headBytes)}},
	}
}

// Has says whether a rank of so many loads a unit.
func (m Model) Has(tensor, rank, unit int) bool {
	ns := m.Namespace(tensor)
	first, count := ns.Pieces(uint32(rank))
	return uint32(unit)-first < count
}

// Whole returns the chunks of which all units are there, from the units of each chunk, one bit for each.
func (m Model) Whole(units map[kv.Key]uint64) map[kv.Key]bool {
	list := map[kv.Key]bool{}
	for key, set := range units {
		if bits.OnesCount64(set) == m.Units {
			list[key] = true
		}
	}
	return list
}

// Shape is what differs.
type Shape struct {
	Tensor int // ranks
	Block  int // tokens
	HND    bool
	Mixed  bool // the heads of a rank lie in any order
}

func (s Shape) String() string {
	return fmt.Sprintf("%d ranks, blocks of %d, HND %v, mixed %v", s.Tensor, s.Block, s.HND, s.Mixed)
}

// Draw draws a shape of so many ranks.
func Draw(rng *rand.Rand, tensor int) Shape {
	return Shape{Tensor: tensor, Block: 16 << rng.IntN(4), HND: rng.IntN(2) == 0, Mixed: rng.IntN(2) == 0}
}

// Engine is an engine's sessions by rank, with the pages of each. Its methods must not be called concurrently.
type Engine struct {
	Shape
	Rand *rand.Rand

	t      testing.TB
	model  Model
	ranks  []*client.Session
	arenas []*client.Arena
	place  []int // of a rank's heads in a page
	blocks uint32
}

// Start starts an engine at a host's socket. It ends with the test, if [Engine.Close] has not ended it.
func Start(t testing.TB, socket, name string, m Model, s Shape) *Engine {
	t.Helper()
	h := fnv.New64a()
	fmt.Fprint(h, t.Name(), name, s)
	e := &Engine{t: t, model: m, Shape: s, Rand: rand.New(rand.NewPCG(1, h.Sum64())), blocks: uint32(2 * Prompt * Tokens / s.Block)}
	for i := range e.local() {
		e.place = append(e.place, i)
	}
	if s.Mixed {
		e.Rand.Shuffle(len(e.place), func(i, j int) { e.place[i], e.place[j] = e.place[j], e.place[i] })
	}
	for rank := range s.Tensor {
		session, err := client.Dial(t.Context(), client.Hello{Socket: socket, Engine: name, Rank: uint32(rank),
			LocalRanks: uint32(s.Tensor), Namespace: m.Namespace(s.Tensor)})
		testenv.OK(t, err)
		arena, err := session.NewArena(Layers * parts * e.plane())
		testenv.OK(t, err)
		e.ranks, e.arenas = append(e.ranks, session), append(e.arenas, arena)
		_, err = session.Register(t.Context(), 0, arena, e.regions())
		testenv.OK(t, err)
	}
	t.Cleanup(e.Close)
	return e
}

// Close ends the sessions.
func (e *Engine) Close() {
	for i, session := range e.ranks {
		_ = session.Close() // its host may be gone
		_ = e.arenas[i].Close()
	}
	e.ranks, e.arenas = nil, nil
}

// local is how many heads a rank has.
func (e *Engine) local() int { return max(1, e.model.Heads/e.Tensor) }

// first is the first head of a rank.
func (e *Engine) first(rank int) int { return rank * e.model.Heads / e.Tensor }

// plane is the bytes of a layer's K or V.
func (e *Engine) plane() int64 { return int64(e.blocks) * int64(e.Block*e.local()*headBytes) }

func (e *Engine) regions() (list []client.PlaneRegion) {
	each := e.model.Heads / e.model.Units
	for unit := range max(1, e.model.Units/e.Tensor) {
		for at := range Layers * parts {
			for head := range each {
				place := e.place[unit*each+head]
				g := client.PlaneRegion{Offset: int64(at)*e.plane() + int64(place*headBytes), Blocks: e.blocks,
					Stride: int64(e.local() * e.Block * headBytes), Pages: uint32(e.Block), PageStride: int64(e.local() * headBytes)}
				if e.HND {
					g.Offset, g.PageStride = int64(at)*e.plane()+int64(place*e.Block*headBytes), headBytes
				}
				list = append(list, g)
			}
		}
	}
	return list
}

// token is the bytes of one token: of a rank's block, layer and part, and head.
func (e *Engine) token(rank, at, local int, block uint32, token int) []byte {
	in := token*e.local() + e.place[local]
	if e.HND {
		in = e.place[local]*e.Block + token
	}
	off := at*int(e.plane()) + int(block)*e.Block*e.local()*headBytes + in*headBytes
	return e.arenas[rank].Bytes()[off:][:headBytes]
}

// each calls do with every token of a prompt's chunks, and what it must hold.
func (e *Engine) each(prompt int, blocks [][]uint32, do func(rank, chunk int, have, want []byte)) {
	var want [headBytes]byte
	for rank := range e.ranks {
		for chunk, ids := range blocks {
			for t := range Tokens {
				for at := range Layers * parts {
					for local := range e.local() {
						for i := 0; i < headBytes; i += 8 {
							binary.LittleEndian.PutUint64(want[i:], uint64(prompt)<<48|uint64(chunk)<<40|uint64(t)<<24|uint64(at)<<16|
								uint64(e.first(rank)+local)<<8|uint64(i))
						}
						do(rank, chunk, e.token(rank, at, local, ids[t/e.Block], t%e.Block), want[:])
					}
				}
			}
		}
	}
}

// draw draws blocks for a prompt's chunks.
func (e *Engine) draw() [][]uint32 {
	ids, n := e.Rand.Perm(int(e.blocks)), Tokens/e.Block
	list := make([][]uint32, Prompt)
	for i := range list {
		for _, id := range ids[i*n:][:n] {
			list[i] = append(list[i], uint32(id))
		}
	}
	return list
}

// Key is the key of a prompt's chunk.
func Key(prompt, chunk int) (k kv.Key) {
	binary.LittleEndian.PutUint32(k[:], uint32(Prompt*prompt+chunk))
	k[31] = 1
	return k
}

// Keys are the keys of a prompt's chunks.
func Keys(prompt int) (list []kv.Key) {
	for i := range Prompt {
		list = append(list, Key(prompt, i))
	}
	return list
}

// StoreJobs begins to store a prompt from all ranks.
func (e *Engine) StoreJobs(prompt int) (jobs []*client.StoreJob, err error) {
	blocks, keys := e.draw(), Keys(prompt)
	e.each(prompt, blocks, func(_, _ int, have, want []byte) { copy(have, want) })
	for _, session := range e.ranks {
		var chunks []client.StoreChunk
		for i, k := range keys {
			c := client.StoreChunk{Key: k, Depth: uint32(i), Blocks: blocks[i]}
			if i > 0 {
				c.Parent = keys[i-1]
			}
			chunks = append(chunks, c)
		}
		job, err := session.Store(e.t.Context(), 0, 0, chunks)
		if err != nil {
			return jobs, err
		}
		jobs = append(jobs, job)
	}
	return jobs, nil
}

// Store stores a prompt from all ranks at once, and returns the results by rank and chunk.
func (e *Engine) Store(prompt int) (results [][]client.ChunkResult, err error) {
	jobs, err := e.StoreJobs(prompt)
	for _, job := range jobs {
		r, jerr := job.Published(e.t.Context())
		err = errors.Join(err, jerr)
		results = append(results, r.Chunks)
	}
	return results, err
}

// Has says whether all ranks may load a chunk.
func (e *Engine) Has(prompt, chunk int) (bool, error) {
	found, err := e.lookup(Keys(prompt)[chunk:][:1])
	if err != nil {
		return false, err
	}
	return found.Hits() == 1, found.Release(e.t.Context())
}

// Look asks by the first rank which chunks of a prompt all ranks may load.
func (e *Engine) Look(prompt int) (*client.Lookup, error) { return e.lookup(Keys(prompt)) }

func (e *Engine) lookup(keys []kv.Key) (*client.Lookup, error) {
	return e.ranks[0].Lookup(e.t.Context(), client.LookupRequest{Keys: keys, Readers: 1<<e.Tensor - 1})
}

// Failure is a chunk that a rank did not get.
type Failure struct{ Rank, Chunk int }

// Load loads a prompt's hits into poisoned blocks, one rank after the other in any order, and returns what failed, in that order. An error
// is something else that must not be: a byte that is not what was stored, or one that was changed around those.
func (e *Engine) Load(prompt int, found *client.Lookup) (failed []Failure, err error) {
	for _, a := range e.arenas {
		for i := range a.Bytes() {
			a.Bytes()[i] = poison
		}
	}
	blocks := e.draw()[:found.Hits()]
	chunks := make([]client.LoadChunk, len(blocks)) // in any order
	for i, at := range e.Rand.Perm(len(blocks)) {
		chunks[i] = client.LoadChunk{Index: at, Blocks: blocks[at]}
	}
	lost := map[Failure]bool{}
	for _, rank := range e.Rand.Perm(e.Tensor) {
		list, err := e.load(rank, found, chunks)
		if err != nil {
			return failed, fmt.Errorf("%s: rank %d: %w", e, rank, err)
		}
		for _, chunk := range list {
			f := Failure{rank, chunk}
			failed, lost[f] = append(failed, f), true
		}
	}
	wrong := 0
	e.each(prompt, blocks, func(rank, chunk int, have, want []byte) {
		if !lost[Failure{rank, chunk}] && string(have) != string(want) {
			wrong++
		}
		for i := range have {
			have[i] = poison
		}
	})
	for _, a := range e.arenas {
		for _, b := range a.Bytes() {
			if b != poison {
				wrong++
			}
		}
	}
	if wrong > 0 {
		return failed, fmt.Errorf("%s: %w: %d tokens of prompt %d or bytes around them", e, errWrong, wrong, prompt)
	}
	return failed, nil
}

var errWrong = errors.New("wrong bytes")

// IsWrong says that an error of [Engine.Load] is of bytes, and none of a host that is gone.
func IsWrong(err error) bool { return errors.Is(err, errWrong) }

// load loads chunks by one rank, and returns those that failed, by their places in the prompt.
func (e *Engine) load(rank int, found *client.Lookup, chunks []client.LoadChunk) (failed []int, err error) {
	var opt client.LoadOptions
	landed, byLayer := 0, e.Rand.IntN(2) == 0
	if byLayer {
		opt.Layers = func(uint32, []int) { landed++ }
	}
	job, err := e.ranks[rank].Load(e.t.Context(), found, chunks, opt)
	if err != nil {
		return nil, err
	}
	res, err := job.Wait(e.t.Context())
	if err != nil {
		return nil, err
	}
	named, seen := map[uint32]bool{}, map[int]bool{}
	for _, f := range res.Failed {
		if named[f.Block] {
			return nil, fmt.Errorf("block %d is named twice among the failures", f.Block)
		}
		named[f.Block] = true
		if at := chunks[f.Chunk].Index; !seen[at] {
			failed, seen[at] = append(failed, at), true
		}
	}
	for at := range seen { // all blocks of a chunk fail, or none
		for _, c := range chunks {
			for _, id := range c.Blocks {
				if c.Index == at && !named[id] {
					return nil, fmt.Errorf("chunk %d failed without its block %d", at, id)
				}
			}
		}
	}
	if byLayer && landed != Layers {
		return nil, fmt.Errorf("%d layers landed, want %d", landed, Layers)
	}
	want := int64(len(chunks)) * Tokens * Layers * parts * int64(e.local()) * headBytes
	if len(failed) == 0 && (res.Bytes != want || found.Bytes != want) {
		return nil, fmt.Errorf("the load has %d bytes, its lookup %d, want %d", res.Bytes, found.Bytes, want)
	}
	return failed, nil
}
