package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// deed is something that a host does, or that happens to it, and how often.
type deed struct {
	name   string
	weight int
	do     func(p *party, rng *rand.Rand) string
}

// drawDeeds gives each deed its weight in this history: some do much of one thing.
func (h *history) drawDeeds() []deed {
	list := []deed{
		{"store", 40, (*party).storeBoth},
		{"load", 30, (*party).lookupAndLoad},
		{"begin", 6, (*party).begin},
		{"finish", 6, (*party).finish},
		{"release", 8, (*party).release},
		{"end request", 2, func(p *party, _ *rand.Rand) string { p.store.EndRequest(1); return "" }},
		{"upkeep", 3, (*party).upkeep},
		{"restart", 2, (*party).reopen},
		{"kill", 2, (*party).kill},
		{"swap evict", 3, (*party).swapEvict},
		{"swap layout", 1, (*party).swapLayout},
		{"swap admit", 1, (*party).swapAdmit},
	}
	if h.kind.power { // it must see every change of the disk
		list = append(list, deed{"power loss", 3, (*party).losePower})
	} else {
		list = append(list, deed{"spoil", 3, (*party).spoil})
	}
	if h.kind.hosts == 1 { // hosts that share a root have one place policy
		list = append(list, deed{"swap place", 2, (*party).swapPlace})
	} else {
		list = append(list, deed{"turns", 30, (*party).takeTurns}, deed{"sleep", 2, (*party).sleep})
	}
	if h.kind.many {
		list = append(list, deed{"rush", 5, (*party).rush})
	}
	for i := range list {
		list[i].weight = max(1, list[i].weight*[]int{1, 2, 2, 2, 6}[h.rng.IntN(5)]/2)
	}
	return list
}

func (h *history) deed(p *party) string {
	all := 0
	for _, d := range h.deeds {
		all += d.weight
	}
	for n, i := h.rng.IntN(all), 0; ; i++ {
		d := h.deeds[i]
		if n -= d.weight; n < 0 {
			return d.name + " " + d.do(p, h.rng)
		}
	}
}

// acceptable are the errors that a put may end in.
func acceptable(err error) bool {
	for _, e := range [...]error{
		nil, ErrResident, ErrNoSpace, ErrRefused, ErrGone, ErrRootOut, staging.ErrInjected, staging.ErrPowerLost, shared.ErrFenced,
	} {
		if err == e || e != nil && errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (p *party) drawPiece(rng *rand.Rand) piece {
	space := 0
	if rng.IntN(4) == 0 {
		space = 1
	}
	return piece{entryOf{space, rng.Uint64N(historyKeys)}, uint32(rng.IntN(2))}
}

func (p *party) asked(of piece) PutRequest {
	q := p.request(of.n, of.n-1, of.rank)
	q.Space = p.spaces[of.space]
	return q
}

// offer begins a put.
func (p *party) offer(of piece) (*offer, error) {
	put, err := p.store.Put(context.Background(), p.asked(of))
	if err != nil {
		return nil, err
	}
	h := p.h
	h.mu.Lock()
	defer h.mu.Unlock()
	h.version++
	o := &offer{Put: put, of: of, version: h.version}
	if h.offered[of] == nil {
		h.offered[of] = map[uint64]bool{}
	}
	return o, nil
}

// conclude writes and publishes. From the moment that the bytes are written they may be served.
func (p *party) conclude(o *offer) error {
	if err := o.fill(p.h.slots); err != nil {
		o.Abort(err)
		return err
	}
	p.h.mu.Lock()
	p.h.offered[o.of][o.version] = true
	p.h.mu.Unlock()
	err := o.Publish(context.Background())
	if err == nil {
		p.h.stored.Add(1)
	}
	return err
}

func (p *party) storeOne(of piece) error {
	o, err := p.offer(of)
	if err == nil {
		err = p.conclude(o)
	}
	if !acceptable(err) && !(isDamage(err) && p.h.kind.hosts > 1) { // what stands there the evictor is asked to remove
		p.Errorf("host %s stores %v: %v", p.cfg.HostID, of, err)
	}
	return err
}

func (p *party) storeBoth(rng *rand.Rand) string {
	of := p.drawPiece(rng)
	var errs [2]error
	for rank := range uint32(2) {
		of.rank = rank
		errs[rank] = p.storeOne(of)
	}
	return fmt.Sprintf("%v: %v, %v", of.entryOf, errs[0], errs[1])
}

func (p *party) begin(rng *rand.Rand) string {
	of := p.drawPiece(rng)
	o, err := p.offer(of)
	if !acceptable(err) {
		p.Fatalf("begin %v: %v", of, err)
	}
	if err == nil {
		p.puts = append(p.puts, o)
	}
	return fmt.Sprintf("%v: %v", of, err)
}

func (p *party) finish(rng *rand.Rand) string {
	if len(p.puts) == 0 {
		return "nothing"
	}
	i := rng.IntN(len(p.puts))
	o := p.puts[i]
	p.puts = append(p.puts[:i], p.puts[i+1:]...)
	if rng.IntN(3) == 0 {
		if rng.IntN(2) == 0 {
			_ = o.fill(p.h.slots)
		}
		o.Abort(errors.New("history"))
		return fmt.Sprintf("%v: aborted", o.of)
	}
	err := p.conclude(o)
	if !acceptable(err) && !(isDamage(err) && p.h.kind.hosts > 1) {
		p.Fatalf("finish %v: %v", o.of, err)
	}
	return fmt.Sprintf("%v: %v", o.of, err)
}

// lookup asks for a run of keys.
func (p *party) lease(space int, from uint64, n int) *held {
	l := &held{lost: map[entryOf]bool{}}
	var list []chunk.Key
	for k := from; k < from+uint64(n); k++ {
		l.keys = append(l.keys, entryOf{space, k})
		list = append(list, testKey(k))
	}
	var err error
	if l.Lease, err = p.store.Lookup(LookupRequest{Space: p.spaces[space], Keys: list}); err != nil {
		p.Fatal(err)
	}
	return l
}

func (p *party) lookupAndLoad(rng *rand.Rand) string {
	of := p.drawPiece(rng)
	l := p.lease(of.space, of.n, 4)
	p.loadAll(l, rng)
	if rng.IntN(3) == 0 && len(p.held) < 4 {
		p.held = append(p.held, l)
		return fmt.Sprintf("%v: %d hits, held", of.entryOf, l.Hits())
	}
	l.Release()
	return fmt.Sprintf("%v: %d hits", of.entryOf, l.Hits())
}

func (p *party) loadAll(l *held, rng *rand.Rand) {
	for i := range l.Hits() {
		of := piece{l.keys[i], uint32(rng.IntN(2))}
		p.h.loads.Add(1)
		data, plan, err := l.load(i, of.rank, p.h.slots)
		p.h.ends.Add(1)
		p.judge(l, of, data, plan, err)
	}
}

// judge compares a load with the model. A load that fails is one whose blocks are computed again.
func (p *party) judge(l *held, of piece, data []byte, plan *chunk.Plan, err error) {
	h := p.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.offered[of]) == 0 {
		h.Errorf("host %s: %v is a hit and was never offered", p.cfg.HostID, of)
		return
	}
	if err == nil {
		h.hits.Add(1)
		version := binary.LittleEndian.Uint64(data)
		if !h.offered[of][version] || !bytes.Equal(data[:plan.PayloadBytes()], content(plan, of, version)[:plan.PayloadBytes()]) {
			h.Errorf("host %s: %v: bytes that were never offered under it (version %d)", p.cfg.HostID, of, version)
		}
		return
	}
	if h.kind.many {
		if !isDamage(err) && !errors.Is(err, ErrGone) && !errors.Is(err, ErrRootOut) && !errors.Is(err, chunk.ErrChecksum) && !errors.Is(err, ErrWrongPiece) {
			h.Errorf("step %d, host %s: %v: %v", len(h.trace), p.cfg.HostID, of, err)
		}
		return // somebody else may have stored it again meanwhile
	}
	if !h.spoilt[of.entryOf] && !l.lost[of.entryOf] && h.faults == nil && !h.kind.power && !p.doubted {
		h.Errorf("step %d, host %s: %v: %v", len(h.trace), p.cfg.HostID, of, err)
	}
	if isDamage(err) || errors.Is(err, ErrGone) || errors.Is(err, chunk.ErrChecksum) || errors.Is(err, ErrWrongPiece) {
		for _, l := range append(p.held, l) {
			l.lost[of.entryOf] = true
		}
		again := p.lease(of.space, of.n, 1)
		if again.Hits() == 1 {
			h.Errorf("host %s: %v is a hit after %v", p.cfg.HostID, of, err)
		}
		again.Release()
		if h.kind.hosts == 1 {
			delete(h.spoilt, of.entryOf) // the others do not know yet
		}
	}
}

func (p *party) release(rng *rand.Rand) string {
	if len(p.held) == 0 {
		return "nothing"
	}
	i := rng.IntN(len(p.held))
	l := p.held[i]
	p.held = append(p.held[:i], p.held[i+1:]...)
	if rng.IntN(2) == 0 {
		p.loadAll(l, rng) // what a lease is on stays
	}
	l.Release()
	return fmt.Sprint(l.keys[0])
}

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
	if len(b) >= Page {
		if head, err := DecodeHeader(b[:Page]); err == nil {
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
			r.tidy(context.Background())
		case 1:
			if p.cfg.Durability == Batch {
				r.flush()
			}
		default:
			if state := r.state(); state > RootFull {
				_ = r.comeBack(context.Background(), state)
			} else {
				r.lookAfter(context.Background())
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
		p.faulty.Set(staging.Rule{Op: staging.OpAny, Path: "**", When: staging.When{First: at}, Fault: staging.Fault{Errno: syscall.EIO}})
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
		p.pass(p.store.roots[0].fellows)
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
				p.pass(p.store.roots[0].fellows)
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
