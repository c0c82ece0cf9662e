package server

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// The shape of a model whose chunks engines of several sizes share.
const (
	unitTokens = 256 // of a chunk
	unitLayers = 2
	unitParts  = 2
	headBytes  = 24 // of a token, not a power of two
	unitPrompt = 3  // chunks
)

// model is what does not differ between engines.
type model struct{ heads, units int }

func (m model) namespace(tensor int) kv.Namespace {
	ns := testNamespace()
	ns.TokensPerBlock, ns.TensorParallel, ns.Units = 1, tensor, m.units
	ns.Groups = []kv.Group{{Geometry: kv.Uniform(unitTokens, unitLayers, uint32(unitParts*m.heads/m.units), headBytes)}}
	return ns
}

// shape is what does.
type engineShape struct {
	tensor int // ranks
	tokens int // of a block
	hnd    bool
}

func (s engineShape) String() string {
	return fmt.Sprintf("%d ranks, blocks of %d, HND %v", s.tensor, s.tokens, s.hnd)
}

// shards are an engine's sessions, with the pages of each.
type shards struct {
	t     *testing.T
	model model
	engineShape
	rng    *rand.Rand
	ranks  []*client.Session
	arenas []*client.Arena
	first  []int // head of each rank
	blocks uint32
}

func (s *shards) local() int { return max(1, s.model.heads/s.tensor) }

func (r *rig) shards(t *testing.T, m model, shape engineShape, name string) *shards {
	t.Helper()
	s := &shards{t: t, model: m, engineShape: shape, rng: rand.New(rand.NewPCG(1, uint64(len(name)+shape.tokens))),
		blocks: uint32(2 * unitPrompt * unitTokens / shape.tokens)}
	plane := int64(s.blocks) * int64(shape.tokens*s.local()*headBytes)
	for rank := range shape.tensor {
		session, err := client.Dial(t.Context(), client.Hello{Socket: r.socket, Engine: name, Rank: uint32(rank),
			LocalRanks: uint32(shape.tensor), Namespace: m.namespace(shape.tensor)})
		testenv.OK(t, err)
		t.Cleanup(func() { session.Close() })
		arena, err := session.NewArena(unitLayers * unitParts * plane)
		testenv.OK(t, err)
		t.Cleanup(func() { arena.Close() })
		var regions []client.PlaneRegion
		each := m.heads / m.units
		for unit := range max(1, m.units/shape.tensor) {
			for at := range unitLayers * unitParts {
				for head := range each {
					local := unit*each + head
					g := client.PlaneRegion{Offset: int64(at)*plane + int64(local*headBytes), Blocks: s.blocks,
						Stride: int64(s.local() * shape.tokens * headBytes), Pages: uint32(shape.tokens), PageStride: int64(s.local() * headBytes)}
					if shape.hnd {
						g.Offset, g.PageStride = int64(at)*plane+int64(local*shape.tokens*headBytes), headBytes
					}
					regions = append(regions, g)
				}
			}
		}
		_, err = session.Register(t.Context(), 0, arena, regions)
		testenv.OK(t, err)
		s.ranks, s.arenas = append(s.ranks, session), append(s.arenas, arena)
		s.first = append(s.first, rank*m.heads/shape.tensor)
	}
	return s
}

// token is a token of a chunk in a block: its bytes of a layer, part and local head.
func (s *shards) token(rank, at, local int, block uint32, token int) []byte {
	plane := int(s.blocks) * s.tokens * s.local() * headBytes
	in := token*s.local() + local
	if s.hnd {
		in = local*s.tokens + token
	}
	off := at*plane + int(block)*s.tokens*s.local()*headBytes + in*headBytes
	return s.arenas[rank].Bytes()[off:][:headBytes]
}

// each calls do with every token of a prompt's chunks, and what it must hold.
func (s *shards) each(prompt int, blocks [][]uint32, do func(rank, chunk int, have, want []byte)) {
	var want [headBytes]byte
	for rank := range s.ranks {
		for chunk, ids := range blocks {
			for t := range unitTokens {
				for at := range unitLayers * unitParts {
					for local := range s.local() {
						for i := 0; i < headBytes; i += 8 {
							binary.LittleEndian.PutUint64(want[i:], uint64(prompt)<<48|uint64(chunk)<<40|uint64(t)<<24|uint64(at)<<16|
								uint64(s.first[rank]+local)<<8|uint64(i))
						}
						do(rank, chunk, s.token(rank, at, local, ids[t/s.tokens], t%s.tokens), want[:])
					}
				}
			}
		}
	}
}

// draw draws blocks for a prompt's chunks.
func (s *shards) draw() [][]uint32 {
	ids, n := s.rng.Perm(int(s.blocks)), unitTokens/s.tokens
	list := make([][]uint32, unitPrompt)
	for i := range list {
		for _, id := range ids[i*n:][:n] {
			list[i] = append(list[i], uint32(id))
		}
	}
	return list
}

func promptKeys(prompt int) (list []kv.Key) {
	for i := range unitPrompt {
		list = append(list, key(1000*prompt+i))
	}
	return list
}

// store stores a prompt from all ranks at once, and returns the results by rank and chunk.
func (s *shards) store(prompt int) [][]client.Result {
	blocks, keys := s.draw(), promptKeys(prompt)
	s.each(prompt, blocks, func(_, _ int, have, want []byte) { copy(have, want) })
	var jobs []*client.StoreJob
	for _, session := range s.ranks {
		var chunks []client.StoreChunk
		for i, k := range keys {
			c := client.StoreChunk{Key: k, Depth: uint32(i), Blocks: blocks[i]}
			if i > 0 {
				c.Parent = keys[i-1]
			}
			chunks = append(chunks, c)
		}
		job, err := session.Store(s.t.Context(), 0, 0, chunks)
		testenv.OK(s.t, err)
		jobs = append(jobs, job)
	}
	var results [][]client.Result
	for _, job := range jobs {
		res, err := job.Published(s.t.Context())
		testenv.OK(s.t, err)
		var list []client.Result
		for _, c := range res.Chunks {
			testenv.OK(s.t, c.Err)
			list = append(list, c.Result)
		}
		results = append(results, list)
	}
	return results
}

// look asks by the first rank what all ranks may load.
func (s *shards) look(prompt int) *client.Lookup {
	found, err := s.ranks[0].Lookup(s.t.Context(), client.LookupRequest{Keys: promptKeys(prompt), Readers: 1<<s.tensor - 1})
	testenv.OK(s.t, err)
	return found
}

// load loads a prompt's hits into poisoned blocks of all ranks, and returns the chunks that failed by rank. All others must hold what
// was stored, and all else the poison.
func (s *shards) load(prompt int, found *client.Lookup, byLayer bool) []map[int]bool {
	for _, a := range s.arenas {
		for i := range a.Bytes() {
			a.Bytes()[i] = 0xa5
		}
	}
	blocks := s.draw()[:found.Hits()]
	var chunks []client.LoadChunk
	for i, ids := range blocks {
		chunks = append(chunks, client.LoadChunk{Index: i, Blocks: ids})
	}
	failed := make([]map[int]bool, s.tensor)
	for rank, session := range s.ranks {
		failed[rank] = map[int]bool{}
		landed := 0
		var opt client.LoadOptions
		if byLayer {
			opt.Layers = func(uint32, []int) { landed++ }
		}
		job, err := session.Load(s.t.Context(), found, chunks, opt)
		testenv.OK(s.t, err)
		res, err := job.Wait(s.t.Context())
		testenv.OK(s.t, err)
		named := map[uint32]bool{}
		for _, f := range res.Failed {
			if failed[rank][f.Chunk] = true; named[f.Block] {
				s.t.Errorf("%s: block %d is named twice among the failures", s, f.Block)
			}
			named[f.Block] = true
		}
		if byLayer && landed != unitLayers {
			s.t.Errorf("%s: %d layers landed, want %d", s, landed, unitLayers)
		}
		if want := int64(found.Hits()-len(failed[rank])) * unitTokens * unitLayers * unitParts * int64(s.local()) * headBytes; len(res.Failed) == 0 &&
			(res.Bytes != want || found.Bytes != want) {
			s.t.Errorf("%s: the load has %d bytes, its lookup %d, want %d", s, res.Bytes, found.Bytes, want)
		}
	}
	wrong := 0
	s.each(prompt, blocks, func(rank, chunk int, have, want []byte) {
		if !failed[rank][chunk] && string(have) != string(want) {
			wrong++
		}
		for i := range have {
			have[i] = 0xa5
		}
	})
	for _, a := range s.arenas {
		for _, b := range a.Bytes() {
			if b != 0xa5 {
				wrong++
			}
		}
	}
	if wrong > 0 {
		s.t.Errorf("%s: %d tokens or bytes around them are wrong", s, wrong)
	}
	return failed
}

func (r *rig) pieces(t *testing.T) (paths []string, bytes int64) {
	t.Helper()
	testenv.OK(t, filepath.WalkDir(filepath.Join(r.dir, "root"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && filepath.Ext(path) == ".kv" {
			info, err := d.Info()
			testenv.OK(t, err)
			paths, bytes = append(paths, path), bytes+info.Size()
		}
		return err
	}))
	return paths, bytes
}

// What an engine of one size stores is a whole hit for those of all others, whatever their blocks and the order in their pages: with
// as many heads as ranks and more, with fewer (each in several ranks), and with one latent in all.
func TestSizesShare(t *testing.T) {
	for _, m := range []model{{heads: 8, units: 8}, {heads: 16, units: 8}, {heads: 2, units: 2}, {heads: 1, units: 1}} {
		t.Run(fmt.Sprint(m), func(t *testing.T) {
			r := newRig(t, nil)
			rng := rand.New(rand.NewPCG(uint64(m.heads), 1))
			var engines []*shards
			for i, tensor := range []int{1, 2, 4, 8} {
				shape := engineShape{tensor: tensor, tokens: 16 << ((i + rng.IntN(4)) % 4), hnd: rng.IntN(2) == 0}
				engines = append(engines, r.shards(t, m, shape, fmt.Sprint("engine ", tensor)))
			}
			for prompt, from := range engines {
				for _, results := range from.store(prompt) {
					for chunk, got := range results {
						if got != client.Stored && (got != client.Resident || m.units >= from.tensor) {
							t.Errorf("%s: chunk %d is %v", from, chunk, got)
						}
					}
				}
				for _, to := range engines {
					found := to.look(prompt)
					if found.Hits() != unitPrompt {
						t.Fatalf("%s finds %d chunks of what %s has stored, want %d", to, found.Hits(), from, unitPrompt)
					}
					for rank, failed := range to.load(prompt, found, rng.IntN(2) == 0) {
						if len(failed) > 0 {
							t.Errorf("%s: rank %d of %s has not got %v", from, rank, to, failed)
						}
					}
				}
				for _, again := range engines { // nothing is written twice
					for _, results := range again.store(prompt) {
						for chunk, got := range results {
							if got != client.Resident {
								t.Errorf("%s stores what %s has stored: chunk %d is %v", again, from, chunk, got)
							}
						}
					}
				}
				if paths, _ := r.pieces(t); len(paths) != (prompt+1)*unitPrompt*m.units {
					t.Errorf("%d prompts have %d pieces, want %d", prompt+1, len(paths), (prompt+1)*unitPrompt*m.units)
				}
			}
		})
	}
}

// Two engines of different sizes store the same prompts at once: no piece is there twice, and both find all.
func TestSizesStoreAtOnce(t *testing.T) {
	r, m := newRig(t, nil), model{heads: 8, units: 8}
	a := r.shards(t, m, engineShape{tensor: 2, tokens: 16}, "a")
	b := r.shards(t, m, engineShape{tensor: 4, tokens: 64, hnd: true}, "b")
	a.store(0)
	_, one := r.pieces(t)
	const prompts = 8
	for prompt := 1; prompt < prompts; prompt++ {
		var both sync.WaitGroup
		both.Go(func() { a.store(prompt) })
		both.Go(func() { b.store(prompt) })
		both.Wait()
		for _, s := range []*shards{a, b} {
			if found := s.look(prompt); found.Hits() != unitPrompt {
				t.Errorf("%s finds %d chunks of prompt %d, want %d", s, found.Hits(), prompt, unitPrompt)
			} else {
				s.load(prompt, found, false)
			}
		}
	}
	for _, x := range r.server.Status().SessionList { // an operator sees which sizes share
		if want := map[string]uint32{"a": 2, "b": 4}[x.Engine]; x.TensorParallel != want || x.Units != 8 {
			t.Errorf("session of engine %s: rank %d of %d, %d units, want %d and 8", x.Engine, x.Rank, x.TensorParallel, x.Units, want)
		}
	}
	if _, all := r.pieces(t); all != prompts*one {
		t.Errorf("%d prompts of two engines have %d bytes, want %d", prompts, all, prompts*one)
	}
}

// A damaged piece fails the blocks of the ranks that have its unit, and of no other; then its chunk is a miss for all.
func TestDamageFailsItsUnit(t *testing.T) {
	for _, tensor := range []int{1, 2, 4, 8} {
		r, m := newRig(t, nil), model{heads: 4, units: 4}
		r.shards(t, m, engineShape{tensor: 1, tokens: 16}, "a").store(0)
		s := r.shards(t, m, engineShape{tensor: tensor, tokens: 32, hnd: true}, "b")
		found := s.look(0)
		paths, _ := r.pieces(t)
		var damaged []kv.Key
		for _, path := range paths { // the last unit of the second chunk: it is loaded after the others
			image, err := os.ReadFile(path)
			testenv.OK(t, err)
			h, err := pieceformat.DecodeHeader(image)
			testenv.OK(t, err)
			if h.Rank == 3 && h.Key == promptKeys(0)[1] {
				image[len(image)-4096] ^= 1
				testenv.OK(t, os.WriteFile(path, image, 0o644))
				damaged = append(damaged, h.Key)
			}
		}
		if len(damaged) != 1 {
			t.Fatalf("%d pieces are unit 3 of the chunk, want 1", len(damaged))
		}
		for rank, failed := range s.load(0, found, false) {
			ns := m.namespace(tensor)
			first, count := ns.Pieces(uint32(rank))
			if has := first+count > 3; failed[1] != has || len(failed) > 1 || failed[0] {
				t.Errorf("%d ranks: rank %d with units %d to %d fails %v", tensor, rank, first, first+count-1, failed)
			}
		}
		if found := s.look(0); found.Hits() != 1 {
			t.Errorf("%d ranks: %d chunks are found after the damage, want 1", tensor, found.Hits())
		}
	}
}

// What a session says of its units must fit.
func TestUnitsAreRefused(t *testing.T) {
	r, m := newRig(t, nil), model{heads: 8, units: 8}
	r.shards(t, m, engineShape{tensor: 2, tokens: 16}, "a")
	ns := m.namespace(3)
	if _, err := proto.FromNamespace(&ns).ToNamespace(); err == nil {
		t.Error("8 units are divided among 3 ranks")
	}
	_, err := client.Dial(t.Context(), client.Hello{Socket: r.socket, Engine: "a", LocalRanks: 2, Namespace: m.namespace(4)})
	var refused *client.HostError
	if !errors.As(err, &refused) || refused.Field != "namespace.tensor_parallel" {
		t.Errorf("a session of another size in the same engine: %v", err)
	}
}

// Engines of three sizes store and load at random at once, in a root that has room for a quarter of it: what is found is right, the root
// keeps within its capacity, and the next host has what is left, for all sizes.
func TestSizesInOneRoot(t *testing.T) {
	const prompts, rounds, capacity = 32, 24, 8 << 20
	root, m := filepath.Join(t.TempDir(), "root"), model{heads: 8, units: 8}
	life := func(name string, live func(t *testing.T, r *rig, engines []*shards)) {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(_ *Config, sc *store.Config) { sc.Roots[0].Path, sc.Roots[0].Capacity = root, capacity })
			var engines []*shards
			for i, tensor := range []int{1, 2, 4} {
				shape := engineShape{tensor: tensor, tokens: 16 << i, hnd: i%2 == 0}
				engines = append(engines, r.shards(t, m, shape, fmt.Sprint(tensor)))
			}
			live(t, r, engines)
			if had := r.store.Stats().Roots[0]; had.Used > capacity || had.Orphaned+had.Held > 0 {
				t.Errorf("the root counts %d bytes of %d, %d orphaned, %d in quarantine", had.Used, capacity, had.Orphaned, had.Held)
			}
		})
	}
	whole := func(t *testing.T, s *shards, prompt int) int {
		found := s.look(prompt)
		if found.Hits() > 0 {
			for rank, failed := range s.load(prompt, found, s.rng.IntN(2) == 0) {
				if len(failed) > 0 {
					t.Errorf("%s: rank %d has not got %v of prompt %d", s, rank, failed, prompt)
				}
			}
		}
		return found.Hits()
	}
	left := 0
	life("first", func(t *testing.T, r *rig, engines []*shards) {
		var all sync.WaitGroup
		for _, s := range engines {
			all.Go(func() {
				for range rounds {
					s.store(s.rng.IntN(prompts))
					whole(t, s, s.rng.IntN(prompts))
				}
			})
		}
		all.Wait()
		if n := r.store.Stats().Roots[0].Evictions; n == 0 {
			t.Error("nothing was evicted")
		}
		for prompt := range prompts {
			left += whole(t, engines[0], prompt)
		}
	})
	life("second", func(t *testing.T, _ *rig, engines []*shards) {
		for _, s := range engines {
			hits := 0
			for prompt := range prompts {
				hits += whole(t, s, prompt)
			}
			if hits != left || hits == 0 {
				t.Errorf("%s has %d hits, want the %d of the first life", s, hits, left)
			}
		}
	})
}

// Hosts that share a root serve each other's engines of other sizes.
func TestSizesShareARootOfHosts(t *testing.T) {
	root, m := filepath.Join(t.TempDir(), "root"), model{heads: 4, units: 4}
	host := func(id string, shape engineShape) *shards {
		r := newRig(t, func(_ *Config, sc *store.Config) {
			sc.HostID = id
			sc.Roots[0].Path, sc.Roots[0].Shared, sc.Roots[0].Poll = root, true, 20*time.Millisecond
		})
		return r.shards(t, m, shape, id)
	}
	a := host("a", engineShape{tensor: 1, tokens: 16})
	b := host("b", engineShape{tensor: 4, tokens: 64, hnd: true})
	for prompt, from := range []*shards{a, b} {
		to := []*shards{b, a}[prompt]
		until(t, "a host may write to the shared root", func() bool {
			from.store(prompt)
			return from.look(prompt).Hits() == unitPrompt
		})
		until(t, "the other host sees what was stored", func() bool { return to.look(prompt).Hits() == unitPrompt })
		for rank, failed := range to.load(prompt, to.look(prompt), false) {
			if len(failed) > 0 {
				t.Errorf("%s: rank %d has not got %v of what %s has stored", to, rank, failed, from)
			}
		}
	}
}
