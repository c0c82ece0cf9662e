package server

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/sizestest"
	"github.com/kvhost/kvhost/host/kv"
)

// shards is an engine of a test that ends with the first error.
type shards struct {
	*sizestest.Engine
	t testing.TB
}

func (r *rig) shards(t testing.TB, m sizestest.Model, shape sizestest.Shape, name string) *shards {
	t.Helper()
	return &shards{sizestest.Start(t, r.socket, name, m, shape), t}
}

// store stores a prompt, and returns the results by rank and chunk.
func (s *shards) store(prompt int) (results [][]client.Result) {
	s.t.Helper()
	all, err := s.Store(prompt)
	testenv.OK(s.t, err)
	for _, chunks := range all {
		var list []client.Result
		for _, c := range chunks {
			testenv.OK(s.t, c.Err)
			list = append(list, c.Result)
		}
		results = append(results, list)
	}
	return results
}

func (s *shards) look(prompt int) *client.Lookup {
	s.t.Helper()
	found, err := s.Look(prompt)
	testenv.OK(s.t, err)
	return found
}

// load loads what was found.
func (s *shards) load(prompt int, found *client.Lookup) []sizestest.Failure {
	s.t.Helper()
	failed, err := s.Load(prompt, found)
	testenv.NoError(s.t, err)
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
	for _, m := range []sizestest.Model{{Heads: 8, Units: 8}, {Heads: 16, Units: 8}, {Heads: 2, Units: 2}, {Heads: 1, Units: 1}} {
		t.Run(fmt.Sprint(m), func(t *testing.T) {
			r := newRig(t, nil)
			rng := rand.New(rand.NewPCG(uint64(m.Heads), 1))
			var engines []*shards
			for _, tensor := range []int{1, 2, 4, 8} {
				shape := sizestest.Draw(rng, tensor)
				engines = append(engines, r.shards(t, m, shape, fmt.Sprint("engine ", tensor)))
			}
			for prompt, from := range engines {
				for _, results := range from.store(prompt) {
					for chunk, got := range results {
						if got != client.Stored && (got != client.Resident || m.Units >= from.Tensor) {
							t.Errorf("%s: chunk %d is %v", from, chunk, got)
						}
					}
				}
				for _, to := range engines {
					found := to.look(prompt)
					if found.Hits() != sizestest.Prompt {
						t.Fatalf("%s finds %d chunks of what %s has stored, want %d", to, found.Hits(), from, sizestest.Prompt)
					}
					if failed := to.load(prompt, found); len(failed) > 0 {
						t.Errorf("%s: %s has not got %v", from, to, failed)
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
				if paths, _ := r.pieces(t); len(paths) != (prompt+1)*sizestest.Prompt*m.Units {
					t.Errorf("%d prompts have %d pieces, want %d", prompt+1, len(paths), (prompt+1)*sizestest.Prompt*m.Units)
				}
			}
		})
	}
}

// Two engines of different sizes store the same prompts at once: no piece is there twice, and both find all.
func TestSizesStoreAtOnce(t *testing.T) {
	r, m := newRig(t, nil), sizestest.Model{Heads: 8, Units: 8}
	a := r.shards(t, m, sizestest.Shape{Tensor: 2, Block: 16}, "a")
	b := r.shards(t, m, sizestest.Shape{Tensor: 4, Block: 64, HND: true}, "b")
	a.store(0)
	_, one := r.pieces(t)
	const prompts = 8
	for prompt := 1; prompt < prompts; prompt++ {
		var both sync.WaitGroup
		both.Go(func() { a.store(prompt) })
		both.Go(func() { b.store(prompt) })
		both.Wait()
		for _, s := range []*shards{a, b} {
			if found := s.look(prompt); found.Hits() != sizestest.Prompt {
				t.Errorf("%s finds %d chunks of prompt %d, want %d", s, found.Hits(), prompt, sizestest.Prompt)
			} else {
				s.load(prompt, found)
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

// A damaged piece fails the blocks of the first rank that loads its unit, and of none that has loaded others before; then its chunk is a
// miss for all.
func TestDamageFailsItsUnit(t *testing.T) {
	for _, tensor := range []int{1, 2, 4, 8} {
		r, m := newRig(t, nil), sizestest.Model{Heads: 4, Units: 4}
		r.shards(t, m, sizestest.Shape{Tensor: 1, Block: 16}, "a").store(0)
		s := r.shards(t, m, sizestest.Shape{Tensor: tensor, Block: 32, HND: true}, "b")
		found := s.look(0)
		paths, _ := r.pieces(t)
		var damaged []kv.Key
		for _, path := range paths {
			image, err := os.ReadFile(path)
			testenv.OK(t, err)
			h, err := pieceformat.DecodeHeader(image)
			testenv.OK(t, err)
			if h.Rank == 3 && h.Key == sizestest.Key(0, 1) {
				image[len(image)-4096] ^= 1
				testenv.OK(t, os.WriteFile(path, image, 0o644))
				damaged = append(damaged, h.Key)
			}
		}
		if len(damaged) != 1 {
			t.Fatalf("%d pieces are unit 3 of the chunk, want 1", len(damaged))
		}
		failed := s.load(0, found)
		for _, f := range failed {
			if f.Chunk != 1 {
				t.Errorf("%d ranks: rank %d fails chunk %d, want none but 1", tensor, f.Rank, f.Chunk)
			}
		}
		if len(failed) == 0 || !m.Has(tensor, failed[0].Rank, 3) {
			t.Errorf("%d ranks: %v fail, want one with unit 3 first", tensor, failed)
		}
		if found := s.look(0); found.Hits() != 1 {
			t.Errorf("%d ranks: %d chunks are found after the damage, want 1", tensor, found.Hits())
		}
	}
}

// What a session says of its units must fit.
func TestUnitsAreRefused(t *testing.T) {
	r, m := newRig(t, nil), sizestest.Model{Heads: 8, Units: 8}
	r.shards(t, m, sizestest.Shape{Tensor: 2, Block: 16}, "a")
	ns := m.Namespace(3)
	if _, err := proto.FromNamespace(&ns).ToNamespace(); err == nil {
		t.Error("8 units are divided among 3 ranks")
	}
	_, err := client.Dial(t.Context(), client.Hello{Socket: r.socket, Engine: "a", LocalRanks: 2, Namespace: m.Namespace(4)})
	var refused *client.HostError
	if !errors.As(err, &refused) || refused.Field != "namespace.tensor_parallel" {
		t.Errorf("a session of another size in the same engine: %v", err)
	}
}
