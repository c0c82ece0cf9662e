package policy

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Misnamed records a name that cannot be right: one that another piece has, or that leads through a file. It counts as
// a fault.
func (p *Place) Misnamed(cause error) {
	p.usage.Faults.Add(1)
	if verdict, _ := p.m.Failed(abi.RolePlace, cause); verdict != Restart {
		p.quarantine()
	}
}

// quarantine ends the naming of new files. The caller does not hold mu.
func (p *Place) quarantine() {
	if !p.quarantined.Swap(true) && p.told != nil {
		p.told()
	}
}

// disqualify ends the use of a policy that is no pure function.
func (p *Place) disqualify(cause error) {
	p.usage.Faults.Add(1)
	p.m.Disqualify(abi.RolePlace, cause)
	p.mu.Lock()
	first := !p.impure.Swap(true)
	if first {
		p.down, p.again = cmp.Or(p.m.Quarantined(), cause), time.Time{}
	}
	idle := p.idle
	p.live -= len(idle)
	p.idle = nil
	p.usage.Builtin.Store(true)
	p.until.Store(math.MaxInt64)
	p.mu.Unlock()
	p.cond.Broadcast()
	p.quarantine()
	for _, g := range idle {
		g.close()
	}
}

// Verify asks for a path again that the policy gave before, and for others that it gave. A policy that gives another one
// is disqualified, and the error is an [ErrImpure].
func (p *Place) Verify(q *abi.PlaceQuery, path []byte) error {
	g, err := p.acquire()
	if err != nil {
		return err
	}
	defer p.release(g)
	if err := p.verify(g, q, path); err != nil {
		return err
	}
	for _, before := range p.given.all() {
		if err := p.verify(g, &before.query, before.path); err != nil {
			return err
		}
	}
	return nil
}

func (p *Place) verify(g placer, q *abi.PlaceQuery, path []byte) error {
	again, _, err := p.pathOf(g, q, path[len(path):])
	if err != nil || bytes.Equal(again, path) {
		return err
	}
	err = fmt.Errorf("%w: it gave %q and %q to one piece", ErrImpure, path, again)
	p.disqualify(err)
	return err
}

// verifyEvery is how many paths are asked for between two that are asked for twice. Of the first so many each call is
// verified, because a policy that counts its calls shows it at once, before a file has its name.
const (
	verifyEvery  = 64
	earlierEvery = 256 // between two of which one is compared with what was given long ago
)

// doubt is who is asked for a path again.
type doubt uint8

const (
	nobody   doubt = 0
	itself   doubt = 1 // the guest that gave it
	somebody doubt = 2 // another guest, if there is one
	earlier  doubt = 4 // the guest that gave it, for another path that was given a while ago
)

// due counts paths, the last of which is given, and says by whom it should be verified.
func (p *Place) due(paths int, q *abi.PlaceQuery, path []byte) (by doubt) {
	now := p.asked.Add(uint64(paths))
	before := now - uint64(paths)
	p.given.note(before, q, path)
	if p.m.code == nil {
		return nobody
	}
	if before < verifyEvery {
		by = itself
	}
	if before == 0 || now/verifyEvery != before/verifyEvery {
		by |= somebody
	}
	if now/earlierEvery != before/earlierEvery {
		by |= earlier
	}
	return by
}

// doubt verifies a path that a guest gave. One that counts its calls gives itself another; one that depends on what it
// was asked before differs from another guest, and one that changes its mind from itself a while ago.
func (p *Place) doubt(by doubt, g placer, q *abi.PlaceQuery, path []byte) error {
	if by&itself != 0 {
		if err := p.verify(g, q, path); err != nil {
			return err
		}
	}
	if by&earlier != 0 {
		if before := p.given.one(); before != nil {
			err := p.verify(g, &before.query, before.path)
			p.given.copies.Put(before)
			if err != nil {
				return err
			}
		}
	}
	if by&somebody == 0 {
		return nil
	}
	other := p.second()
	if other == nil {
		return p.verify(g, q, path)
	}
	defer p.release(other)
	if err := p.verify(other, q, path); errors.Is(err, ErrImpure) {
		return err
	}
	return nil // a fault of the other guest says nothing about the path
}
