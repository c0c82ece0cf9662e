// Package wtinylfu is the first-party eviction policy "wtinylfu": a window in order of last use takes every new entry;
// one that falls out of it enters the main part only if it was used more often, by a compact sketch of the recent past,
// than the entry that main would evict for it. Main is in two segments: entries used there again are protected. The
// window's share adapts to what brings hits.
//
// G. Einziger, R. Friedman, B. Manes, TinyLFU: A Highly Efficient Cache Admission Policy, ACM Transactions on Storage
// 13(4), 2017; G. Einziger, O. Eytan, R. Friedman, B. Manes, Adaptive Software Cache Management, Middleware 2018 (the
// hill climber, with the step sizes of the authors' Caffeine library).
//
// Caffeine starts with a window of 1 % and samples ten times the number of entries; window=1 and sample=10 do that. The
// defaults here are 20 % and 2: chunks of live sessions are used many times within minutes and then never again, so
// that a long memory of counts keeps the dead.
//
// The host asks for victims before the new entry is inserted, so the contest between the window's oldest and main's
// oldest is held while the window is about to overflow. The window's limit binds when entries are inserted; a smaller
// limit takes effect over the following inserts.
//
// O(1) per event.
package wtinylfu

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

// Config keys.
const (
	ConfigWindow = "window" // the window's share at the start, percent
	ConfigAdapt  = "adapt"  // whether it changes
	ConfigSample = "sample" // accesses between changes, and the sketch's memory, in resident entries
)

const (
	window slots.List = 1 + iota
	probation
	protected
)

const protectedShare = 80 // percent of main

// Policy is a [guest.Evictor].
type Policy struct {
	t        *slots.Table
	sketch   sketch
	climber  climber
	capacity uint64
	share    int64 // of the window
	windowTo uint64
	protTo   uint64
	sample   uint64
	adapt    bool
	full     bool // victims were asked for: from then on hit ratios mean something
}

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	start, err := info.Config.Int(ConfigWindow, 20, 1, 80)
	if err != nil {
		return nil, err
	}
	sample, err := info.Config.Int(ConfigSample, 2, 1, 1000)
	if err != nil {
		return nil, err
	}
	adapt, err := info.Config.Bool(ConfigAdapt, true)
	if err != nil {
		return nil, err
	}
	t, err := slots.NewTable(info.MaxSlots, 0, protected)
	if err != nil {
		return nil, err
	}
	p := &Policy{
		t: t, sketch: newSketch(info.MaxSlots), climber: climber{step: firstStep},
		capacity: info.Capacity / abi.SizeUnit, sample: uint64(sample), adapt: adapt,
	}
	p.setShare((start*shareUnit + 99) / 100)
	return p, nil
}

func (p *Policy) setShare(share int64) {
	p.share = share
	p.windowTo = max(1, p.capacity/shareUnit*uint64(share)+p.capacity%shareUnit*uint64(share)/shareUnit)
	p.protTo = (p.capacity - min(p.capacity, p.windowTo)) * protectedShare / 100
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.t.Apply(batch, p) }

// Remove forgets an entry.
func (p *Policy) Remove(slot uint32) { p.t.Remove(slot) }

// used counts a use and lets the climber move.
func (p *Policy) used(key uint64, counter *uint64) {
	n := p.sample * uint64(1+p.t.Len(window)+p.t.Len(probation)+p.t.Len(protected))
	p.sketch.add(key, n)
	if !p.full || !p.adapt {
		return
	}
	*counter++
	if share := p.climber.sample(n, p.share); share != p.share {
		p.setShare(share)
	}
}

// Touch is a hit.
func (p *Policy) Touch(slot uint32) {
	p.used(p.t.At(slot).Key, &p.climber.hits)
	switch p.t.In(slot) {
	case window:
		p.t.Renew(slot)
	case probation:
		p.t.MoveFront(protected, slot)
		for n := 0; n < settled && p.t.Units(protected) > p.protTo; n++ {
			p.t.MoveFront(probation, p.t.Back(protected))
		}
	case protected:
		p.t.Renew(slot)
	}
}

// settled is how many entries one event moves out of a part that is above its share at most.
const settled = 4

// Insert is a miss.
func (p *Policy) Insert(ev *abi.Event) {
	p.used(ev.Key, &p.climber.misses)
	p.t.Insert(ev, window)
	for n := 0; n < settled && p.t.Units(window) > p.windowTo && p.t.Len(window) > 1; n++ {
		p.t.MoveFront(probation, p.t.Back(window))
	}
}

// contestSteps is what a contest costs, compared with the steps of other policies.
const contestSteps = 2

// Victims holds the contest while the window, with what is to come, is above its share; otherwise main's oldest goes.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	p.full = true
	a := p.t.Ask(ask, dst)
	candidate := p.next(&a, p.t.Back(window))
	victim := p.victim(&a, slots.None)
	for a.More() && (candidate != slots.None || victim != slots.None) {
		contest := a.Left(window)+a.Want() > p.windowTo
		a.Hurry(contestSteps)
		switch {
		case victim == slots.None, candidate != slots.None && contest && p.count(candidate) <= p.count(victim):
			a.Name(candidate)
			candidate = p.next(&a, p.t.Before(candidate))
		default:
			if candidate != slots.None && contest {
				won := candidate
				candidate = p.next(&a, p.t.Before(won))
				p.t.MoveFront(probation, won)
			}
			a.Name(victim)
			victim = p.victim(&a, victim)
		}
	}
	a.NameFrom(p.t.Back(probation)) // those that won since victim passed there
	return a.Count()
}

func (p *Policy) count(slot uint32) uint64 { return p.sketch.count(p.t.At(slot).Key) }

// next is the first entry from at towards the front that may be named.
func (p *Policy) next(a *slots.Naming, at uint32) uint32 {
	for at != slots.None && !a.May(at) && a.More() {
		at = p.t.Before(at)
	}
	return at
}

// victim is main's next: of probation, then of protected.
func (p *Policy) victim(a *slots.Naming, last uint32) uint32 {
	from := probation
	at := slots.None
	if last == slots.None {
		at = p.t.Back(probation)
	} else {
		from, at = p.t.In(last), p.t.Before(last)
	}
	at = p.next(a, at)
	if at == slots.None && from == probation {
		at = p.next(a, p.t.Back(protected))
	}
	return at
}
