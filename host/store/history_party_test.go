package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/crashfs"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// party is a host of a history.
type party struct {
	*fixture
	h       *history
	base    string
	spaces  [2]*Space // of namespaces that differ in their revision only
	faulty  *faultfs.FS
	machine *crashfs.FS // nil: its power never fails
	held    []*held
	puts    []*offer
	asleep  int  // turns that it does not take
	doubted bool // it was given up, or may have been: what it had leased may be gone
}

// held is a lease with the keys that it is on.
type held struct {
	*Lease
	keys []entryOf
	lost map[entryOf]bool // a load has shown that its file is bad, and the entry went
}

// offer is a put with what it is of.
type offer struct {
	*Put
	of      piece
	version uint64
	written bool
}

const (
	historyKeys  = 24
	historyPoll  = time.Second
	historyLapse = 10 * time.Second
)

func (h *history) newParty(i int, base string) *party {
	p := &party{h: h, base: base}
	p.fixture = &fixture{TB: h, ns: testNamespace(2)}
	p.cfg = Config{
		Seed: h.seed, HostID: string(rune('a' + i)), Log: slog.New(slog.DiscardHandler), Now: fakeClock(), ScanWorkers: 1,
		Durability:      []Durability{None, Batch, Strict}[h.rng.IntN(3)],
		BatchEvery:      time.Hour, // deeds do the stores' own work, so that a seed replays
		UpkeepEvery:     time.Hour,
		QuarantineFiles: 3,
	}
	if h.kind.many && h.kind.hosts == 1 && h.rng.IntN(2) == 0 {
		p.cfg.EvictMode, p.cfg.High, p.cfg.Low = Background, 0.9, 0.7
	}
	for j := range h.kind.roots {
		r := RootConfig{Path: filepath.Join(base, fmt.Sprintf("root%d", j)), Capacity: 20*pieceBytes + int64(j)*4*pieceBytes + 7*pieceformat.Page, MaxEntries: 80}
		if h.kind.hosts > 1 {
			r.Capacity = 48 * pieceBytes
			r.Shared, r.Poll, r.Lapse = true, historyPoll, historyLapse
			r.Scheduler = &Scheduler{Now: h.clock, Wait: p.pass}
		}
		p.cfg.Roots = append(p.cfg.Roots, r)
	}
	return p
}

func (h *history) clock() time.Duration { return time.Hour + time.Duration(h.now.Load()) }

// open starts the host, on a machine of its own.
func (p *party) open() {
	p.Helper()
	var under staging.FS = staging.OS()
	p.machine = nil
	if p.h.kind.power {
		var err error
		if p.machine, err = crashfs.New(staging.OS(), filepath.Join(p.base, "grave")); err != nil {
			p.Fatal(err)
		}
		under = p.machine
	}
	p.faulty = faultfs.New(under)
	p.cfg.FS = p.faulty
	p.doubted, p.asleep = false, 0
	s, err := Open(context.Background(), p.cfg)
	if err != nil {
		p.Fatalf("host %s: %v", p.cfg.HostID, err)
	}
	p.store = s
	p.Cleanup(func() { s.Close() })
	<-s.ScanDone()
	for i := range p.spaces {
		ns := *p.ns
		ns.Revision = fmt.Sprint(i)
		if p.spaces[i], err = s.Space(context.Background(), &ns); err != nil {
			p.Fatal(err)
		}
	}
	p.space = p.spaces[0]
}

// endMachine clears what a machine keeps beside the roots.
func (p *party) endMachine() {
	if p.machine != nil {
		if err := os.RemoveAll(filepath.Join(p.base, "grave")); err != nil {
			p.Fatal(err)
		}
	}
}

// crash ends the host without a word, wherever its puts are. Nothing that it does not do at each step reaches the disk.
func (p *party) crash() {
	s := p.store
	s.closed.Store(true)
	s.stop()
	s.work.Wait()
	s.endTrials()
	for _, r := range s.roots {
		if c := r.fellows; c != nil {
			c.stop()
			<-c.ended
			c.stop = nil // it does not leave
		}
	}
	for _, o := range p.puts {
		o.mu.Lock()
		_ = o.closeFile()
		o.mu.Unlock()
	}
	p.held, p.puts = nil, nil
	if err := errors.Join(s.closeRoots(), s.closePolicies()); err != nil && p.machine == nil {
		p.Fatal(err)
	}
}

// pass is the turn of all hosts that share the root.
func (p *party) pass(step func()) {
	h := p.h
	h.turns.Lock()
	defer h.turns.Unlock()
	h.now.Add(int64(historyPoll))
	for _, o := range h.parties {
		if o.asleep > 0 {
			o.asleep--
			o.doubted = true
			continue
		}
		if o != p && o.store != nil {
			_ = o.store.Maintain(context.Background(), 0, Step)
		}
	}
	step()
}

// turn is a turn of all hosts, this one included.
func (p *party) turn() {
	p.pass(func() { _ = p.store.Maintain(context.Background(), 0, Step) })
}

// wakeUp ends a sleep.
func (p *party) wakeUp() { p.asleep = 0 }

// calm lets hosts that share a root find together.
func (h *history) calm() {
	p := h.parties[0]
	if h.kind.hosts == 1 {
		return
	}
	for _, p := range h.parties {
		p.backIn()
	}
	for range 60 {
		p.turn()
	}
	evictors := 0
	for _, p := range h.parties {
		p.doubted = false
		st := p.fellowStats()
		if st.State != shared.Active {
			h.Fatalf("host %s is %s", p.cfg.HostID, st.State)
		}
		if st.Evictor {
			evictors++
		}
	}
	if evictors != 1 {
		h.Fatalf("%d evictors: %+v", evictors, []*SharedStats{h.parties[0].store.Stats().Roots[0].Shared, h.parties[1].store.Stats().Roots[0].Shared})
	}
}

// content is the bytes that a version of a piece has.
func content(plan *chunk.Plan, of piece, version uint64) []byte {
	b := make([]byte, pieceformat.Padded(plan.PayloadBytes()))
	r := rand.New(rand.NewPCG(of.n<<16|uint64(of.space)<<8|uint64(of.rank), version))
	for i := 8; i+8 <= int(plan.PayloadBytes()); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	binary.LittleEndian.PutUint64(b, version)
	return b
}

// fill writes what a version has to a put's file.
func (o *offer) fill(pool *staging.Slots) error {
	file, err := o.File()
	if err != nil {
		return err
	}
	slot, err := pool.Acquire(context.Background())
	if err != nil {
		return err
	}
	defer slot.Release()
	plan, image := o.Plan(), slot.Bytes()[:o.FileBytes()]
	clear(image)
	copy(image[o.DataOffset():], content(plan, o.of, o.version))
	table := make([]uint64, len(plan.Extents()))
	chunk.SumExtents(plan, 0, len(table), image[o.DataOffset():], 0, table)
	o.Head(image, table)
	_, err = file.WriteAt(image, 0)
	o.written = err == nil
	return err
}

// load reads a piece through its open file and verifies all of it. What fails is told to the store.
func (l *held) load(i int, rank uint32, pool *staging.Slots) ([]byte, *chunk.Plan, error) {
	p, err := l.Open(i, rank)
	if err != nil {
		return nil, nil, err
	}
	defer p.Close()
	slot, err := pool.Acquire(context.Background())
	if err != nil {
		return nil, nil, err
	}
	defer slot.Release()
	image := slot.Bytes()[:min(pieceformat.Padded(p.Size()), int64(len(slot.Bytes())))]
	fail := func(err error) ([]byte, *chunk.Plan, error) { p.Bad(err); return nil, nil, err }
	if p.Size() < pieceformat.Page {
		return fail(pieceformat.ErrDamaged)
	}
	n, err := p.File().ReadAt(image, 0)
	if int64(n) < p.Size() {
		return fail(errors.Join(err, pieceformat.ErrDamaged))
	}
	head, err := p.Verify(image[:n])
	if err != nil {
		return fail(err)
	}
	data := image[head.DataOffset:n]
	if err := chunk.VerifyExtents(head.Plan, 0, len(head.Table), data, 0, head.Table); err != nil {
		return fail(err)
	}
	return slices.Clone(data), head.Plan, nil
}

// invariants are what must hold between any two deeds.
func (p *party) invariants() error {
	if p.h.kind.hosts > 1 {
		if err := p.store.roots[0].check(); err != nil {
			return err
		}
		if disk, most := onDisk(p, p.cfg.Roots[0].Path), p.cfg.Roots[0].Capacity; disk > most {
			return fmt.Errorf("%d bytes on disk, of %d", disk, most)
		}
		return nil
	}
	clean := p.h.faults == nil && !p.h.kind.power && !p.h.kind.many
	temporaries := 0
	for i, r := range p.store.roots {
		if err := r.check(); err != nil {
			return err
		}
		if p.cfg.EvictMode == Background {
			_ = r.turn.lock(context.Background()) // its evictor is not in the middle of something
			defer r.turn.unlock()
		}
		st := p.store.Stats().Roots[i]
		disk, n := usage(p, r.dir)
		temporaries += n
		if disk > min(st.Used, st.Capacity) {
			disk -= p.nobodys(r)
		}
		switch {
		case disk > st.Capacity:
			return fmt.Errorf("%d bytes on disk, of %d; %+v", disk, st.Capacity, st)
		case st.Used > st.Capacity && clean:
			return fmt.Errorf("%d bytes used of %d", st.Used, st.Capacity)
		case disk > st.Used:
			return fmt.Errorf("%d bytes on disk, the account says %d", disk, st.Used)
		}
	}
	open := 0
	for _, o := range p.puts {
		if o.temp != "" {
			open++
		}
	}
	if clean && temporaries != open {
		return fmt.Errorf("%d temporaries, %d puts have one", temporaries, open)
	}
	return nil
}

// nobodys is what damaged files take under names that no policy at hand can read back, as after one that is linked in was
// replaced: to a scan they are like any other program's, left alone and not counted.
func (p *party) nobodys(r *root) (bytes int64) {
	err := filepath.WalkDir(r.dir, func(name string, e os.DirEntry, err error) error {
		rel, _ := filepath.Rel(r.dir, name)
		switch {
		case err != nil:
			return err
		case e.IsDir() && rel == pieceformat.MetaDir:
			return fs.SkipDir
		case e.IsDir():
			return nil
		}
		f, err := staging.OS().OpenFile(name, os.O_RDONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, info, err := inspect(f)
		if pieceformat.IsDamage(err) && !p.store.Claims(rel) {
			bytes += pieceformat.Padded(info.Allocated)
		}
		return nil
	})
	if err != nil {
		p.Fatal(err)
	}
	return bytes
}

// compareAccounts compares what hosts reckon with with what a scan of the disk finds. Nothing is under way.
func (h *history) compareAccounts() {
	if h.kind.hosts == 1 {
		for i, st := range h.parties[0].store.Stats().Roots {
			r := h.parties[0].store.roots[i]
			disk, temporaries := usage(h, r.dir)
			disk -= h.parties[0].nobodys(r)
			if disk += r.missing(); st.Used != disk || temporaries != 0 || st.Used > st.Capacity {
				h.Fatalf("root %d: the account says %d bytes of %d, the disk %d; %d temporaries", i, st.Used, st.Capacity, disk, temporaries)
			}
		}
		return
	}
	for _, p := range h.parties {
		st, disk := p.store.Stats().Roots[0], onDisk(h, p.cfg.Roots[0].Path)
		if st.Shared.Evictor && st.Used != disk {
			h.Fatalf("the evictor %s reckons with %d bytes, the disk has %d", p.cfg.HostID, st.Used, disk)
		}
	}
}

// pieces lists the files that hold pieces, by path.
func (p *party) pieces() (names []string) {
	for _, root := range p.cfg.Roots {
		err := filepath.WalkDir(root.Path, func(name string, e os.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err == nil && e.IsDir() && filepath.Base(name)[0] == '.' {
				return filepath.SkipDir
			}
			if _, temp := pieceformat.ParseTemp(e.Name()); err == nil && !e.IsDir() && !temp {
				names = append(names, name)
			}
			return err
		})
		if err != nil {
			p.Fatal(err)
		}
	}
	return names
}
