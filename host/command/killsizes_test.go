package command

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/testkit/sizestest"
	"github.com/kvhost/kvhost/host/kv"
)

// sizesToKill are more prompts than the root has room for.
const sizesToKill = 8

// TestKillRoundsOfSizes kills a real host with SIGKILL while engines of three sizes store and load the same prompts, again and again on
// the same root, of which a piece is damaged between some of the lives. After each start engines of all sizes find the chunks of which all
// pieces are there, and load what was stored; a damaged piece fails its chunk, first of all for a rank that has its unit.
func TestKillRoundsOfSizes(t *testing.T) {
	t.Parallel() // it waits more than it works
	seed := testenv.Seed(t, "kill.seed", *killSeed)
	rng := rand.New(rand.NewPCG(seed, 56))
	s := &killSizes{T: t, rng: rng, dir: shortDir(t), model: sizestest.Model{Heads: 8, Units: 4}}
	tally := testenv.NewTally(t, "kills-of-sizes")
	tally.Add(0, 0, 1)
	for round := 0; round < *killRounds && !t.Failed(); round++ {
		k := &kill{T: t, dir: s.dir, round: round, durability: pick(rng, "none", "strict"), after: rng.Int64N(300),
			more: []string{"--socket", "s"}}
		tally.Add(s.round(k), 1, 0)
		if t.Failed() {
			t.Logf("round %d of seed %d: %+v", round, seed, *k)
		}
	}
	if s.found == 0 || s.stored == 0 {
		t.Errorf("%d chunks were stored, and %d found after kills: no round has tested anything", s.stored, s.found)
	}
	t.Logf("%d chunks stored, %d loads after kills, %d of damaged chunks", s.stored, s.found, s.damaged)
}

// killSizes is the rounds of one root.
type killSizes struct {
	*testing.T
	rng     *rand.Rand
	dir     string
	model   sizestest.Model
	stored  int
	found   int
	damaged int
}

// round is one life of a host.
func (s *killSizes) round(k *kill) (published int64) {
	spoiled, unit := s.spoil()
	address, _, stop := k.start()
	var engines []*sizestest.Engine
	for _, size := range []int{1, 2, 4} {
		engines = append(engines, sizestest.Start(s, filepath.Join(s.dir, "s"), fmt.Sprint(size), s.model, sizestest.Draw(s.rng, size)))
	}
	s.rng.Shuffle(len(engines), func(i, j int) { engines[i], engines[j] = engines[j], engines[i] })
	s.recovered(engines, spoiled, unit)
	var all sync.WaitGroup
	stored := make([]int, len(engines))
	for i, e := range engines {
		all.Go(func() { stored[i] = s.work(e) })
	}
	published = k.awaitPieces(address, nil)
	stop(syscall.SIGKILL)
	all.Wait()
	for _, n := range stored {
		s.stored += n
	}
	for _, e := range engines {
		e.Close()
	}
	return published
}

// work stores and loads until the host is gone, and returns how many chunks were stored.
func (s *killSizes) work(e *sizestest.Engine) (stored int) {
	for {
		results, err := e.Store(e.Rand.IntN(sizesToKill))
		if err != nil {
			return stored
		}
		for _, c := range results[0] {
			if c.Result == client.Stored {
				stored++
			}
		}
		prompt := e.Rand.IntN(sizesToKill)
		found, err := e.Look(prompt)
		if err != nil {
			return stored
		}
		if found.Hits() == 0 {
			continue
		}
		if failed, err := e.Load(prompt, found); sizestest.IsWrong(err) || err == nil && len(failed) > 0 {
			s.Errorf("%s: %v of prompt %d failed beside stores, error %v", e, failed, prompt, err)
		}
	}
}

// recovered has all engines find and load what the last life has left. One key is of a damaged chunk, unless it is that of none.
func (s *killSizes) recovered(engines []*sizestest.Engine, spoiled kv.Key, unit int) {
	whole := s.whole()
	for prompt := range sizesToKill {
		for chunk := range sizestest.Prompt {
			key := sizestest.Key(prompt, chunk)
			for _, e := range engines {
				there, err := e.Has(prompt, chunk)
				testenv.OK(s, err)
				if there != whole[key] {
					s.Errorf("%s: chunk %d of prompt %d is a hit: %v, its pieces are all there: %v", e, chunk, prompt, there, whole[key])
				}
			}
		}
	}
	for prompt := range sizesToKill {
		at := slices.Index(sizestest.Keys(prompt), spoiled)
		for _, e := range engines {
			found, err := e.Look(prompt)
			testenv.OK(s, err)
			if found.Hits() == 0 {
				continue
			}
			failed, err := e.Load(prompt, found)
			testenv.NoError(s, err)
			s.found += found.Hits()
			for _, f := range failed {
				if f.Chunk != at {
					s.Errorf("%s: rank %d has not got chunk %d of prompt %d, which is not damaged", e, f.Rank, f.Chunk, prompt)
				}
			}
			if at < 0 || at >= found.Hits() {
				continue
			}
			if s.damaged++; len(failed) == 0 || !s.model.Has(e.Tensor, failed[0].Rank, unit) {
				s.Errorf("%s: unit %d of chunk %d of prompt %d is damaged, and these fail: %v", e, unit, at, prompt, failed)
			}
			at = -1 // its entry went
		}
	}
}

// spoil damages a piece of a chunk now and then that recovered loads, and returns its chunk and its unit.
func (s *killSizes) spoil() (key kv.Key, unit int) {
	found := s.hits()
	if len(found) == 0 || s.rng.IntN(2) == 0 {
		return key, 0
	}
	pieces := s.pieces()
	slices.Sort(pieces)
	for _, i := range s.rng.Perm(len(pieces)) {
		h, ok := headerOf(pieces[i])
		if !ok || !found[h.Key] {
			continue
		}
		b, err := os.ReadFile(pieces[i])
		testenv.OK(s, err)
		b[h.DataOffset+s.rng.Int64N(h.Payload)] ^= 0x10
		testenv.OK(s, os.WriteFile(pieces[i], b, 0o600))
		return h.Key, int(h.Rank)
	}
	return key, 0
}

// hits is the chunks that a lookup of their prompt finds: those before them are whole, too.
func (s *killSizes) hits() map[kv.Key]bool {
	whole, found := s.whole(), map[kv.Key]bool{}
	for prompt := range sizesToKill {
		for _, key := range sizestest.Keys(prompt) {
			if !whole[key] {
				break
			}
			found[key] = true
		}
	}
	return found
}

// pieces are the files of pieces.
func (s *killSizes) pieces() (list []string) {
	testenv.OK(s, filepath.WalkDir(filepath.Join(s.dir, "kvhost-data"), func(name string, e fs.DirEntry, err error) error {
		switch {
		case os.IsNotExist(err):
			return nil
		case err == nil && e.IsDir() && e.Name() == ".kvhost":
			return fs.SkipDir
		case err == nil && filepath.Ext(name) == ".kv":
			list = append(list, name)
		}
		return err
	}))
	return list
}

// whole is the chunks of which all pieces are there.
func (s *killSizes) whole() map[kv.Key]bool {
	units := map[kv.Key]uint64{}
	for _, name := range s.pieces() {
		if h, ok := headerOf(name); ok {
			units[h.Key] |= 1 << h.Rank
		}
	}
	return s.model.Whole(units)
}
