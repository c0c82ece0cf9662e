package peers

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// giveBack returns the entries of loans that are due. It returns all loans if the peer is not in state Here.
func (x *peer) giveBack() {
	x.giving.Lock()
	defer x.giving.Unlock()
	now := time.Now()
	x.mu.Lock()
	list, all := x.loans, x.state != Here
	x.loans = nil
	x.mu.Unlock()
	var left []*loan
	for _, l := range list {
		x.mu.Lock()
		over := all || now.After(l.ends)
		half := !over && !l.renewing && l.ends.Sub(now) < l.lasts/2
		x.mu.Unlock()
		if over || now.After(l.due) {
			l.entries = x.owner.store.GiveBack(l.entries, over)
		}
		if len(l.entries) > 0 {
			left = append(left, l)
			if half {
				l.renewing = true
				x.owner.work.Go(func() { x.renew(l) })
			}
			continue
		}
		x.owner.work.Go(func() { x.giveLease(l.lease, nil) })
	}
	if left != nil {
		x.mu.Lock()
		x.loans = append(x.loans, left...)
		x.mu.Unlock()
	}
}

// giveLease tells the peer that a lease and slots are no longer needed. If the call fails, the lease is noted for a repetition.
// Without it, lease and slots expire at the peer.
func (x *peer) giveLease(lease uint64, done []uint64) {
	client, err := x.client(false)
	if err == nil {
		ctx, stop := context.WithTimeout(x.run, returnTimeout)
		defer stop()
		_, err = client.Return(ctx, &proto.ReturnRequest{Lease: lease, Done: done})
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if err != nil && lease != 0 && len(x.owed) < mostLent {
		x.owed = append(x.owed, lease)
	}
}

// renew asks the lender to extend a loan that is still in use after half of its time. This happens when a load is slow or
// waits.
func (x *peer) renew(l *loan) {
	client, err := x.client(false)
	if err != nil {
		return
	}
	ctx, stop := context.WithTimeout(x.run, returnTimeout)
	defer stop()
	since := time.Now()
	r, err := client.Renew(ctx, &proto.RenewRequest{Lease: l.lease, Time: durationpb.New(l.lasts)})
	x.mu.Lock()
	defer x.mu.Unlock()
	l.renewing = false
	if lasts := min(r.GetTime().AsDuration(), l.lasts, longestLease); err == nil && lasts >= leastLease {
		l.ends = since.Add(lasts)
	}
}

// left returns the time until a loan ends.
func (x *peer) left(l *loan) time.Duration {
	x.mu.Lock()
	defer x.mu.Unlock()
	return time.Until(l.ends)
}
