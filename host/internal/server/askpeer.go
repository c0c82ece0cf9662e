package server

import (
	"slices"

	"github.com/kvhost/kvhost/host/internal/peers"
	"github.com/kvhost/kvhost/host/internal/store"
)

// mostAsking is how many LOOKUPs of a session may wait for peers.
const mostAsking = 64

// asking is a LOOKUP that is answered once a peer was asked. Other messages of the session do not wait for it.
type asking struct {
	request uint32
	ended   bool // the request is: nothing is granted
}

// askPeer asks a peer for what a lookup has missed, on a goroutine that the session's end waits for, and answers then. It is false if
// that cannot be. The turn is held.
func (x *session) askPeer(ask *peers.Ask, q store.LookupRequest, a lookupInHand) bool {
	if len(x.asking) >= mostAsking {
		return false
	}
	q.Keys = slices.Clone(q.Keys) // they are the session's scratch memory
	this := &asking{request: a.lease.request}
	if !x.jobs.wait(func() {
		more := ask.Run(x.ctx)
		x.inbox.Turn.Lock()
		defer x.inbox.Turn.Unlock()
		x.asking = slices.DeleteFunc(x.asking, func(o *asking) bool { return o == this })
		x.answerAsked(more, this.ended, q, a)
	}) {
		return false
	}
	x.asking = append(x.asking, this)
	return true
}

// answerAsked looks again if there is more to be found, and answers. The turn is held.
func (x *session) answerAsked(more, ended bool, q store.LookupRequest, a lookupInHand) {
	if ended || x.inbox.closed {
		a.lease.pins.Release()
		a.lease = nil
	} else if more {
		q.After = a.lease.pins
		l, err := x.server.store.Lookup(q)
		if err != nil {
			a.lease.pins.Release()
			x.refuse(a.message, err)
			return
		}
		a.lease.pins = l
	}
	if err := x.answerLookup(a); err != nil {
		x.refuse(a.message, err)
	}
}

// endAsking has LOOKUPs of a request that ends grant nothing. The turn is held.
func (x *session) endAsking(request uint32) {
	for _, o := range x.asking {
		o.ended = o.ended || o.request == request
	}
}
