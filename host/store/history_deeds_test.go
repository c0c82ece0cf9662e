package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging/crashfs"
	"github.com/kvhost/kvhost/staging/faultfs"
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
		nil, ErrResident, ErrNoSpace, ErrRefused, ErrGone, ErrRootOut, faultfs.ErrInjected, crashfs.ErrPowerLost, shared.ErrFenced,
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
	if !acceptable(err) && !(pieceformat.IsDamage(err) && p.h.kind.hosts > 1) { // what stands there the evictor is asked to remove
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
	if !acceptable(err) && !(pieceformat.IsDamage(err) && p.h.kind.hosts > 1) {
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
		if !pieceformat.IsDamage(err) && !errors.Is(err, ErrGone) && !errors.Is(err, ErrRootOut) && !errors.Is(err, chunk.ErrChecksum) && !errors.Is(err, pieceformat.ErrWrongPiece) {
			h.Errorf("step %d, host %s: %v: %v", len(h.trace), p.cfg.HostID, of, err)
		}
		return // somebody else may have stored it again meanwhile
	}
	if !h.spoilt[of.entryOf] && !l.lost[of.entryOf] && h.faults == nil && !h.kind.power && !p.doubted {
		h.Errorf("step %d, host %s: %v: %v", len(h.trace), p.cfg.HostID, of, err)
	}
	if pieceformat.IsDamage(err) || errors.Is(err, ErrGone) || errors.Is(err, chunk.ErrChecksum) || errors.Is(err, pieceformat.ErrWrongPiece) {
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
