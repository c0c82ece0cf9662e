package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/kvhost/kvhost/host/store/health"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// What befalls a host of a history: damage, death, power, sleep, its own upkeep, and all at once.

// spoil damages or removes a file behind the stores' back.
func (p *party) spoil(rng *rand.Rand) string {
	list := p.pieces()
	if len(list) == 0 {
		return "nothing"
	}
	name := list[rng.IntN(len(list))]
	b, err := os.ReadFile(name)
	if err != nil {
		p.Fatal(err)
	}
	if len(b) >= pieceformat.Page {
		if head, err := pieceformat.DecodeHeader(b[:pieceformat.Page]); err == nil {
			for space, s := range p.spaces {
				for n := range uint64(historyKeys) {
					if s.Digest == head.Namespace && testKey(n) == head.Key {
						p.h.spoilt[entryOf{space, n}] = true
					}
				}
			}
		}
	}
	if strings.Contains(name, "/heap/") {
		return "nothing" // without its header it is a foreign file, and without it another key's takes the name
	}
	what := "flipped"
	switch rng.IntN(4) {
	case 0:
		what, err = "removed", os.Remove(name)
	case 1:
		what, err = "cut", os.Truncate(name, int64(rng.IntN(pieceBytes)))
	default:
		var f *os.File
		if f, err = os.OpenFile(name, os.O_WRONLY, 0); err == nil {
			at := rng.IntN(max(1, len(b)-4))
			_, err = f.WriteAt([]byte{byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32())}, int64(at))
			f.Close()
		}
	}
	if err != nil {
		p.Fatal(err)
	}
	return what + " " + name
}

// upkeep does what a host does by itself now and then.
func (p *party) upkeep(rng *rand.Rand) string {
	for _, r := range p.store.roots {
		switch rng.IntN(3) {
		case 0:
			r.retryDeletes(context.Background())
		case 1:
			if p.cfg.Durability == Batch {
				r.flush()
			}
		default:
			if state := r.health.State(); state > health.Full {
				_ = r.health.Reopen(context.Background(), r)
			} else {
				r.checkHealth(context.Background())
			}
		}
	}
	return ""
}

func (p *party) letGo() {
	for _, l := range p.held {
		l.Release()
	}
	for _, o := range p.puts {
		o.Abort(errors.New("history"))
	}
	p.held, p.puts = nil, nil
}

// reopen closes and opens the store: what was a hit is one again, unless its files were spoilt. (With faults, files that
// would not be unlinked come back and may push others out.)
func (p *party) reopen(rng *rand.Rand) string {
	p.faulty.Set()
	p.letGo()
	p.wakeUp()
	p.backIn()
	before := p.present()
	p.drawPolicies(rng)
	if err := p.store.Close(); err != nil {
		p.Fatal(err)
	}
	p.open()
	p.kept(before)
	p.faulty.Set(p.h.faults...)
	return fmt.Sprintf("with %d entries, place %s", len(before), p.cfg.Policies.Place.Name)
}

// kill ends the host at once: between two deeds, or at any of the calls of the next few.
func (p *party) kill(rng *rand.Rand) string {
	p.wakeUp()
	what := "between deeds"
	var before []entryOf
	if rng.IntN(3) == 0 {
		before = p.present()
	} else {
		at := 1 + rng.Uint64N(60)
		what = fmt.Sprintf("at call %d", at)
		p.faulty.Set(faultfs.Rule{Op: staging.OpAny, Path: "**", When: faultfs.When{First: at}, Fault: faultfs.Fault{Errno: syscall.EIO}})
		for range 6 {
			if rng.IntN(3) == 0 {
				p.begin(rng)
			} else {
				p.storeBoth(rng)
			}
		}
	}
	p.crash()
	p.drawPolicies(rng)
	p.open()
	p.kept(before)
	p.faulty.Set(p.h.faults...)
	return what
}

// losePower ends the machine, with what was not synced.
func (p *party) losePower(rng *rand.Rand) string {
	if err := p.machine.PowerLoss(rng.Uint64()); err != nil {
		p.Fatal(err)
	}
	p.crash()
	p.drawPolicies(rng)
	p.open()
	return ""
}

// present are the entries that are hits.
func (p *party) present() (list []entryOf) {
	for space := range p.spaces {
		for n := range uint64(historyKeys) {
			l := p.lease(space, n, 1)
			if l.Hits() == 1 {
				list = append(list, entryOf{space, n})
			}
			l.Release()
		}
	}
	return list
}

// kept says that what was a hit still is one.
func (p *party) kept(before []entryOf) {
	if p.h.faults != nil || p.h.kind.power || p.h.kind.hosts > 1 || p.cfg.EvictMode == Background {
		return // files that would not go come back; an evictor goes on by itself
	}
	for _, e := range before {
		l := p.lease(e.space, e.n, 1)
		if l.Hits() == 0 && !p.h.spoilt[e] {
			p.Errorf("step %d: %v was a hit before the restart", len(p.h.trace), e)
		}
		l.Release()
	}
}

// readAll reads every hit.
func (p *party) readAll() {
	for space := range p.spaces {
		for n := range uint64(historyKeys) {
			l := p.lease(space, n, 1)
			for rank := range uint32(2) {
				if l.Hits() == 1 {
					p.loadAll(l, rand.New(rand.NewPCG(uint64(rank), 0)))
				}
			}
			l.Release()
		}
	}
}

func (p *party) takeTurns(rng *rand.Rand) string {
	n := 1 + rng.IntN(4)
	for range n {
		p.turn()
	}
	return fmt.Sprint(n)
}

// sleep keeps a host from its turns for so long that the others may give it up.
func (p *party) sleep(rng *rand.Rand) string {
	for _, o := range p.h.parties {
		if o.asleep > 0 {
			return "another one does"
		}
	}
	p.asleep = 1 + rng.IntN(30)
	p.doubted = true
	return fmt.Sprint(p.asleep)
}

// frozenDisk adds up what a root takes while nobody can reserve anything: else a file that goes and one that comes in its
// place would both be seen.
func (h *history) frozenDisk(root int) int64 {
	for _, p := range h.parties {
		p.store.roots[root].mu.Lock()
		defer p.store.roots[root].mu.Unlock()
	}
	return onDisk(h, h.parties[0].cfg.Roots[root].Path)
}

// rush lets clients do deeds at the same time, and looks at the disk meanwhile.
func (p *party) rush(rng *rand.Rand) string {
	p.letGo()
	stop := make(chan struct{})
	var watch, clients sync.WaitGroup
	watch.Go(func() {
		for {
			for i, root := range p.cfg.Roots {
				if disk := p.h.frozenDisk(i); disk > root.Capacity {
					p.Errorf("root %d: %d bytes on disk, of %d", i, disk, root.Capacity)
				}
			}
			select {
			case <-stop:
				return
			default:
			}
			if p.h.kind.hosts > 1 {
				p.turn()
			}
		}
	})
	for range 4 {
		own := rand.New(rand.NewPCG(rng.Uint64(), 2))
		who := p.h.parties[rng.IntN(len(p.h.parties))]
		clients.Go(func() {
			for range 30 {
				switch n := own.IntN(10); {
				case n < 5:
					who.storeBoth(own)
				case n < 9:
					of := who.drawPiece(own)
					l := who.lease(of.space, of.n, 3)
					who.loadAll(l, own)
					l.Release()
				default:
					if o, err := who.offer(who.drawPiece(own)); err == nil {
						_ = o.fill(who.h.slots)
						o.Abort(errors.New("history"))
					}
				}
			}
		})
	}
	clients.Go(func() { p.swapEvict(rng) })
	clients.Wait()
	close(stop)
	watch.Wait()
	return ""
}
