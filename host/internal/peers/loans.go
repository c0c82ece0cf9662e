package peers

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// due returns the time from which entries without a local lease are returned.
func (l *loan) due() time.Time { return l.since.Add(min(unused, l.lasts/2)) }

// giveBack returns the entries of loans that are due. It returns all loans if the peer is not in state Here.
func (x *peer) giveBack() {
	for _, lease := range x.ended(0) {
		x.owner.work.Go(func() { x.giveLease(lease, nil) })
	}
}

// makeRoom returns the loans that are not due but have no local lease, and waits until the peer has them. So a peer that lends
// as much as one host may have can lend what a lookup asks for now. Loans that are younger than a request may last are kept: the
// lookup that asked for them is about to find them. makeRoom reports whether it returned a loan.
func (x *peer) makeRoom(ctx context.Context) bool {
	leases := x.ended(x.owner.cfg.Deadline)
	returned := make(chan struct{}, len(leases))
	for _, lease := range leases {
		x.owner.work.Go(func() {
			x.giveLease(lease, nil)
			returned <- struct{}{}
		})
	}
	for range leases {
		select {
		case <-returned:
		case <-ctx.Done():
			return false
		}
	}
	return len(leases) > 0
}

// ended removes the entries of loans that are due, or older than age if that is not 0, and returns the leases of the loans
// without entries.
func (x *peer) ended(age time.Duration) (leases []uint64) {
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
		if over || now.After(l.due()) || age > 0 && now.Sub(l.since) > age {
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
		leases = append(leases, l.lease)
	}
	if left != nil {
		x.mu.Lock()
		x.loans = append(x.loans, left...)
		x.mu.Unlock()
	}
	return leases
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
