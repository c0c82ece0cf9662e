package shared

import (
	"sync/atomic"
	"time"
)

// presence is the state of a member's joining and heartbeats. Its methods are safe for concurrent use.
type presence struct {
	lapse  time.Duration
	now    func() time.Duration
	unique func() uint64

	wakeup  chan struct{}
	beatAt  atomic.Int64 // when the last heartbeat was written; 0 while fenced
	ticket  atomic.Uint64
	scanned atomic.Uint64
}

// init prepares the presence of a host that has not joined.
func (p *presence) init(lapse time.Duration, now func() time.Duration, unique func() uint64) {
	p.lapse, p.now, p.unique, p.wakeup = lapse, now, unique, make(chan struct{}, 1)
}

func (p *presence) Wake() {
	select {
	case p.wakeup <- struct{}{}:
	default:
	}
}

// Wakeups returns a channel that receives a value if a step should be made before the next poll.
func (p *presence) Wakeups() <-chan struct{} { return p.wakeup }

// Fresh reports whether this host is admitted and wrote a heartbeat less than half of Lapse ago. If not, nothing may be leased
// or written.
func (p *presence) Fresh() bool {
	at := p.beatAt.Load()
	return at != 0 && p.now()-time.Duration(at) < p.lapse/2
}

// beat records the time at which a heartbeat was written.
func (p *presence) beat(at time.Duration) { p.beatAt.Store(int64(max(1, at))) }

// silence ends the presence: Fresh returns false until the next heartbeat.
func (p *presence) silence() {
	p.beatAt.Store(0)
	p.ticket.Store(0)
}

// Ticket returns a number that changes when the root must be scanned. It is 0 while this host is not admitted.
func (p *presence) Ticket() uint64 { return p.ticket.Load() }

// scanAgain requests a scan of the root.
func (p *presence) scanAgain() { p.ticket.Store(max(1, p.unique())) }

// Scanned reports that a scan of the whole root has ended which began after Ticket returned ticket.
func (p *presence) Scanned(ticket uint64) { p.scanned.Store(ticket) }

// isScanned reports whether the scan that was requested last has ended.
func (p *presence) isScanned() bool { return p.scanned.Load() == p.ticket.Load() }
