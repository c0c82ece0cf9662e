package policy

import (
	"cmp"
	"context"
	"errors"
	"math"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy/sandbox"
)

// The guests of a place policy: how they are taken, returned and lost.

// acquire returns a guest that knows every namespace and the current roots.
func (p *Place) acquire() (placer, error) { return p.take(true) }

// second returns another guest than the caller has, or nil where that would have to be waited for.
func (p *Place) second() placer {
	g, err := p.take(false)
	if err != nil {
		return nil
	}
	return g
}

var errBusy = errors.New("policy: all guests are busy")

func (p *Place) take(wait bool) (placer, error) {
	p.mu.Lock()
	for len(p.idle) == 0 && p.err == nil && !p.impure.Load() && (p.live == p.most || p.live > 0 && p.pausing()) {
		if !wait {
			p.mu.Unlock()
			return nil, errBusy
		}
		p.cond.Wait()
	}
	err := p.err
	if err == nil && (p.impure.Load() || len(p.idle) == 0 && p.pausing()) {
		err = p.down
	}
	if err != nil {
		p.mu.Unlock()
		return nil, err
	}
	var g placer
	if n := len(p.idle); n > 0 {
		g = p.idle[n-1]
		p.idle = p.idle[:n-1]
	} else {
		p.live++
	}
	known, roots, round := p.known, p.roots, p.round
	p.mu.Unlock()
	if g == nil {
		if g, err = p.start(context.Background()); err != nil {
			p.lost(err)
			return nil, err
		}
		p.usage.Builtin.Store(false)
		p.until.Store(0)
	}
	if told, err := g.update(known, roots, round); err != nil {
		if told < len(known) {
			refusal := err // err must not escape
			known[told].refused.Store(&refusal)
			p.refuses.Store(true)
		}
		p.release(g)
		return nil, err
	}
	return g, nil
}

// release returns a guest to the pool, or drops a dead one.
func (p *Place) release(g placer) {
	if err := g.dead(); err != nil {
		p.lost(err)
		return
	}
	p.mu.Lock()
	if p.err != nil || p.impure.Load() {
		p.live--
		p.mu.Unlock()
		g.close()
		return
	}
	p.idle = append(p.idle, g)
	p.mu.Unlock()
	p.cond.Signal()
}

// lost records the end of a guest. Another one may start at once, because existing files cannot be found meanwhile, and
// quarantine is never more than a few faults away.
func (p *Place) lost(cause error) {
	verdict, _ := p.m.Failed(abi.RolePlace, cause)
	p.mu.Lock()
	p.live--
	p.down, p.again = cause, time.Now()
	switch verdict {
	case Quarantine:
		p.down, p.again = cmp.Or(p.m.Quarantined(), cause), time.Now().Add(quarantinePause)
	case Halt:
		p.again = time.Time{}
	}
	p.usage.Builtin.Store(p.live == 0)
	if p.live == 0 && !p.impure.Load() {
		p.until.Store(math.MaxInt64)
		if !p.again.IsZero() {
			p.until.Store(sandbox.Nanotime() + int64(time.Until(p.again)))
		}
	}
	p.mu.Unlock()
	p.cond.Broadcast() // waiters may have to fail now
	if verdict == Quarantine {
		p.quarantine()
	}
}

// Down reports that no call can succeed now, so that the files that the policy named cannot be found.
func (p *Place) Down() bool {
	t := p.until.Load()
	return t != 0 && sandbox.Nanotime() < t
}

// Quarantined reports that the policy must not name new files.
func (p *Place) Quarantined() bool { return p.quarantined.Load() }

// pausing reports that no guest may be started now. The caller holds mu.
func (p *Place) pausing() bool {
	return p.down != nil && (p.again.IsZero() || time.Now().Before(p.again))
}
