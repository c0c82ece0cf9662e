package server

import (
	"context"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/internal/peers"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// mostAsking is how many LOOKUPs of a session may wait for peers.
const mostAsking = 64

// askPeer asks a peer for what a lookup has missed, on a goroutine that the session's end waits for, and answers then. It is false if
// that cannot be. The turn is held.
func (x *session) askPeer(ask *peers.Ask, q store.LookupRequest, a lookupInHand) bool {
	if len(x.lookups.asking) >= mostAsking {
		return false
	}
	q.Keys = slices.Clone(q.Keys) // they are the session's scratch memory
	this := &asking{request: a.lease.request}
	deadline := x.server.cfg.Peers.Deadline()
	if !x.jobs.wait(func() {
		ctx, stop := context.WithTimeout(x.ctx, deadline)
		defer stop()
		again := time.Now().Add(deadline / 2) // who is asked later has little time to answer
		if next := x.asked(ask, ask.Run(ctx), this, q, a, again); next != nil {
			x.asked(next, next.Run(ctx), this, q, a, time.Time{})
		}
	}) {
		return false
	}
	x.lookups.asking = append(x.lookups.asking, this)
	return true
}

// asked looks again if there is more to be found, and answers, unless another peer promises what those that were asked have evicted or will not
// lend: it is asked if there is time.
func (x *session) asked(ask *peers.Ask, more bool, this *asking, q store.LookupRequest, a lookupInHand, again time.Time) *peers.Ask {
	x.inbox.Turn.Lock()
	defer x.inbox.Turn.Unlock()
	if !this.ended && !x.inbox.closed {
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

// wasAsked ends the wait of a LOOKUP. The turn is held.
func (x *session) wasAsked(this *asking) {
	x.lookups.asking = slices.DeleteFunc(x.lookups.asking, func(o *asking) bool { return o == this })
}

// endAsking has LOOKUPs of a request that ends grant nothing. The turn is held.
func (x *session) endAsking(request uint32) {
	for _, o := range x.lookups.asking {
		o.ended = o.ended || o.request == request
	}
}
