package server

import (
	"context"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/internal/peers"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// mostAsking is the maximum number of LOOKUPs of a session that may wait for peers at a time.
const mostAsking = 64

// askPeer asks peers for the entries that a lookup missed, and answers the LOOKUP afterwards. It does so on a goroutine that
// the session's end waits for. It returns false, without asking, if the session has too many such LOOKUPs or is ending. The
// turn must be held.
func (x *session) askPeer(ask *peers.Ask, q store.LookupRequest, a lookupInHand) bool {
	if len(x.lookups.asking) >= mostAsking {
		return false
	}
	q.Keys = slices.Clone(q.Keys) // the session reuses the memory of the keys for its next LOOKUP
	this := &asking{request: a.lease.request}
	deadline := x.server.cfg.Peers.Deadline()
	if !x.jobs.wait(func() {
		ctx, stop := context.WithTimeout(x.ctx, deadline)
		defer stop()
		again := time.Now().Add(deadline / 2) // a peer that is asked later than this has too little time to answer
		if next := x.asked(ask, ask.Run(ctx), this, q, a, again); next != nil {
			x.asked(next, next.Run(ctx), this, q, a, time.Time{})
		}
	}) {
		return false
	}
	x.lookups.asking = append(x.lookups.asking, this)
	return true
}

// asked ends one round of asking. It repeats the lookup if peers have lent entries, and answers. If other peers promise entries
// that the peers of this round have evicted or would not lend, and again has not passed, it returns an Ask for them instead of
// answering.
func (x *session) asked(ask *peers.Ask, more bool, this *asking, q store.LookupRequest, a lookupInHand, again time.Time) *peers.Ask {
	x.inbox.Turn.Lock()
	defer x.inbox.Turn.Unlock()
	if !this.ended && !x.inbox.closed.Load() {
		if more {
			q.After = a.lease.pins
			l, err := x.server.store.Lookup(q)
			if err != nil {
				a.lease.pins.Release()
				x.refuse(a.message, err)
				x.wasAsked(this)
				return nil
			}
			a.lease.pins = l
		}
		if time.Now().Before(again) {
			if next := x.server.cfg.Peers.Promise(&q, a.lease.pins, a.group.Lookup != kv.ByMembership, ask); next != nil {
				return next
			}
		}
	} else {
		a.lease.pins.Release()
		a.lease = nil
	}
	if err := x.answerLookup(a); err != nil {
		x.refuse(a.message, err)
	}
	x.wasAsked(this)
	return nil
}

// wasAsked removes a LOOKUP from those that wait for peers. The turn must be held.
func (x *session) wasAsked(this *asking) {
	x.lookups.asking = slices.DeleteFunc(x.lookups.asking, func(o *asking) bool { return o == this })
}

// endAsking makes the waiting LOOKUPs of a request grant nothing, because the request has ended. The turn must be held.
func (x *session) endAsking(request uint32) {
	for _, o := range x.lookups.asking {
		o.ended = o.ended || o.request == request
	}
}
