package bench

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/drive"
)

// pass is one measured operation.
type pass struct {
	ready func() error
	run   func() (drive.Times, error) // if it returns no time, the bench measures it
	check func() error
	rate  *[]float64
	cpu   *[]float64
}

// round makes every pass once with each setting, in alternating order. Loads read the files that the round's store has written, so the
// first load finds files that have not been read. The plain threads read their own files as often.
func (b *bench) round(ctx context.Context, round int, r *results) error {
	if err := b.forget(ctx); err != nil {
		return err
	}
	if err := b.all.meet(ctx); err != nil { // from here on, the bytes of the root are counted
		return err
	}
	b.stored = b.chunks(round)
	read, write := func() error { return b.readFiles(ctx, round) }, func() error { return b.writeFiles(ctx, round) }
	groups := [len(passNames)][]pass{
		stores:     b.ceilings(ctx, gds.Gather, write, &r.ceilings[stores]),
		freshLoads: b.ceilings(ctx, gds.Scatter, read, &r.ceilings[freshLoads]),
		laterLoads: b.ceilings(ctx, gds.Scatter, read, &r.ceilings[laterLoads]),
	}
	for i, s := range b.sessions {
		f := &r.ours[i]
		groups[stores] = append(groups[stores], b.storePass(ctx, s, &f[stores], round))
		for pass := freshLoads; pass <= layerLoads; pass++ {
			if pass != layerLoads || b.Direct == nil {
				groups[pass] = append(groups[pass], b.loadPass(ctx, s, pass == layerLoads, &f[pass], round))
			}
		}
	}
	for _, passes := range groups {
		if round%2 == 1 {
			slices.Reverse(passes)
		}
		for _, p := range passes {
			if err := b.time(ctx, &p, round); err != nil {
				return err
			}
		}
	}
	return nil
}

// ceilings returns the passes of the ceilings: the plain copy and the plain threads. For a root in memory there are no
// plain threads, because they would only measure another copy.
func (b *bench) ceilings(ctx context.Context, dir gds.Direction, plain func() error, c *ceilings) []pass {
	list := []pass{{run: func() (drive.Times, error) { return drive.Times{}, b.copyAll(ctx, dir) }, rate: &c.copy}}
	if b.InMemory {
		return list
	}
	return append(list, pass{run: func() (drive.Times, error) { return drive.Times{}, plain() }, rate: &c.plain, cpu: &c.plainCPU})
}

func (b *bench) storePass(ctx context.Context, s *session, f *figures, round int) pass {
	var before int64
	return pass{rate: &f.ours, cpu: &f.cpu,
		ready: func() (err error) {
			if before, err = s.host.used(ctx); err != nil {
				return err
			}
			return planes(b.Geometry, func(i int) error { return b.pages.set(i, b.image[i]) })
		},
		run: func() (drive.Times, error) { return s.store(ctx, b.stored) },
		check: func() error {
			after, err := s.host.used(ctx)
			if round > 0 {
				f.stored = append(f.stored, float64(int64(b.Clients)*b.pageBytes())/float64(after-before))
			}
			return err
		},
	}
}

// pageBytes returns the page bytes of all chunks of a client.
func (b *bench) pageBytes() int64 { return int64(b.Chunks) * b.Geometry.PageBytes() }

// loadPass returns a pass that loads into other blocks than the chunks were stored from.
func (b *bench) loadPass(ctx context.Context, s *session, byLayer bool, f *figures, round int) pass {
	back := slices.Clone(b.stored)
	for i, ids := range b.blocks.Draw(b.Chunks) {
		back[i].Blocks = ids
	}
	return pass{rate: &f.ours, cpu: &f.cpu,
		ready: func() error { return planes(b.Geometry, func(i int) error { return b.pages.set(i, nil) }) },
		run: func() (drive.Times, error) {
			took, err := s.load(ctx, back, byLayer)
			if byLayer && round > 0 && err == nil {
				f.first = append(f.first, took.First.Seconds()/took.Whole.Seconds())
				f.firstMS = append(f.firstMS, 1e3*took.First.Seconds())
				f.wholeMS = append(f.wholeMS, 1e3*took.Whole.Seconds())
			}
			return took, err
		},
		check: func() error { return compare(b.pages, b.Geometry, b.image, b.got, b.stored, back) },
	}
}

// time runs a pass, and keeps its figures unless the round is not counted.
func (b *bench) time(ctx context.Context, p *pass, round int) error {
	if p.ready != nil {
		if err := p.ready(); err != nil {
			return err
		}
	}
	if err := b.all.meet(ctx); err != nil {
		return err
	}
	before, start := b.processor(), time.Now()
	took, err := p.run()
	if took.Whole == 0 {
		took.Whole = time.Since(start)
	}
	used := b.processor() - before
	if err != nil {
		return err
	}
	if err := b.all.meet(ctx); err != nil {
		return err
	}
	if round > 0 {
		gb := float64(b.pageBytes()) / 1e9
		*p.rate = append(*p.rate, gb/took.Whole.Seconds())
		if p.cpu != nil {
			*p.cpu = append(*p.cpu, used.Seconds()/gb)
		}
	}
	if p.check != nil {
		return p.check()
	}
	return nil
}

// processor returns the processor time of this process and of the hosts.
func (b *bench) processor() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	all := time.Duration(u.Utime.Nano() + u.Stime.Nano())
	for _, s := range b.sessions {
		all += s.host.processor()
	}
	return all
}

// chunks returns the chunks of a round, as prompts in newly drawn blocks.
func (b *bench) chunks(round int) (all []client.StoreChunk) {
	blocks := b.blocks.Draw(b.Chunks)
	for first := 0; first < b.Chunks; first += promptChunks {
		which := make([]int, min(promptChunks, b.Chunks-first))
		ids := make([]uint64, len(which))
		for i := range which {
			which[i], ids[i] = i, uint64(round*b.Chunks+first+i)
		}
		all = append(all, drive.NewPrompt(0, drive.ChainKeys(nil, ids), which, blocks[first:]).Chunks...)
	}
	return all
}

// forget removes the files of the last round, so that this round's files take the same memory. Memory that was not used
// before costs its first user more.
func (b *bench) forget(ctx context.Context) error {
	if b.stored == nil {
		return nil
	}
	var err error
	for _, s := range b.sessions {
		err = errors.Join(err, s.forget(ctx, b.stored))
	}
	if !b.InMemory {
		err = errors.Join(err, remove(b.FS, filepath.Join(b.Dir, "plain")))
	}
	return err
}
