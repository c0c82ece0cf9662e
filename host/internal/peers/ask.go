package peers

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// Ask is a peer's promise of what a lookup has missed.
type Ask struct {
	peer    *peer
	list    int
	lookup  store.LookupRequest
	leading bool
	keys    []kv.Key
}

// Promise says which peer promises most of what a lookup has not found, or nil: for a run the longest one after the hits, else the most
// keys. It costs no message, and allocates nothing where there is no promise.
func (p *Peers) Promise(q *store.LookupRequest, found *store.Lease, leading bool) *Ask {
	if p == nil || q.Pin {
		return nil
	}
	usable := p.usable.Load()
	if usable == 0 || found.Hits() == len(q.Keys) {
		return nil
	}
	printer := kv.PrinterOf(q.Namespace.Digest, q.Group)
	if leading {
		rest := q.Keys[found.Hits():]
		n, has := 0, usable
		for ; n < len(rest); n++ {
			if also := has & p.table.at(printer.Print(&rest[n])); also != 0 {
				has = also
				continue
			}
			break
		}
		if n == 0 {
			return nil
		}
		rotate := int(rest[0][0]) % lists // those that promise as much take turns
		return p.ask(q, true, (bits.TrailingZeros64(bits.RotateLeft64(has, -rotate))+rotate)%lists, rest[:n])
	}
	var count [lists]int
	best := 0
	for i := range q.Keys {
		if found.Has(i) {
			continue
		}
		for has := usable & p.table.at(printer.Print(&q.Keys[i])); has != 0; has &= has - 1 {
			list := bits.TrailingZeros64(has)
			if count[list]++; count[list] > count[best] {
				best = list
			}
		}
	}
	if count[best] == 0 {
		return nil
	}
	keys := make([]kv.Key, 0, count[best])
	for i := range q.Keys {
		if !found.Has(i) && p.table.at(printer.Print(&q.Keys[i]))&(1<<best) != 0 {
			keys = append(keys, q.Keys[i])
		}
	}
	return p.ask(q, false, best, keys)
}

// ask is nil if the peer has gone, or is not to be asked for that, and while as much is read as may be.
func (p *Peers) ask(q *store.LookupRequest, leading bool, list int, keys []kv.Key) *Ask {
	x := p.of[list].Load()
	if x == nil || p.reads.behind() > longestWait/2 {
		return nil
	}
	x.mu.Lock()
	apart := x.apart[apartKey{q.Namespace.Digest, q.Group}]
	x.mu.Unlock()
	if apart || len(keys) == 0 {
		return nil
	}
	a := &Ask{peer: x, list: list, lookup: *q, leading: leading, keys: slices.Clone(keys[:min(len(keys), mostKeys)])}
	a.lookup.Keys = nil
	return a
}

// Run asks the peer for a lease within the deadline, and enters what it lends. It says whether there is more to be found now.
func (a *Ask) Run(ctx context.Context) bool {
	x := a.peer
	select {
	case x.asks <- struct{}{}:
		defer func() { <-x.asks }()
	default: // it has enough to answer
		return false
	}
	x.count.asks.Add(1)
	x.count.keys.Add(uint64(len(a.keys)))
	since := time.Now()
	n, err := a.borrow(ctx, since)
	x.count.waited.Add(int64(time.Since(since)))
	switch status.Code(err) {
	case codes.ResourceExhausted: // it is busy, and says so
	default:
		if err != nil {
			x.failed(err)
		} else {
			x.worked()
		}
	}
	if err != nil {
		x.owner.cfg.Log.Debug("a peer lends nothing", "peer", x.addr, "error", err)
	}
	return n > 0
}

func (a *Ask) borrow(ctx context.Context, since time.Time) (entered int, err error) {
	x, p := a.peer, a.peer.owner
	client, err := x.client(false)
	if err != nil {
		return 0, err
	}
	ctx, stop := context.WithTimeout(ctx, p.cfg.Deadline)
	defer stop()
	q := &proto.LeaseRequest{
		NamespaceDigest: a.lookup.Namespace.Digest[:], Group: a.lookup.Group, Ranks: a.lookup.Ranks, Leading: a.leading,
		Keys: make([]byte, 0, len(a.keys)*kv.KeyBytes), Time: durationpb.New(2 * p.cfg.LeaseTime),
	}
	for i := range a.keys {
		q.Keys = append(q.Keys, a.keys[i][:]...)
	}
	r, err := client.Lease(ctx, q)
	if err != nil {
		return 0, err
	}
	ranks := bits.OnesCount64(a.lookup.Ranks)
	given := make([]bool, len(a.keys))
	l := &loan{peer: x, lease: r.GetLease(), namespace: a.lookup.Namespace.Digest, group: a.lookup.Group}
	lent := &store.Loan{Namespace: a.lookup.Namespace, Group: a.lookup.Group, Tenant: a.lookup.Tenant, Ranks: a.lookup.Ranks}
	var index []uint32
	for _, e := range r.GetEntries() {
		if int64(e.GetIndex()) >= int64(len(given)) || given[e.GetIndex()] || len(e.GetBytes()) != ranks {
			return 0, fmt.Errorf("%w: an entry that was not asked for", ErrMessage)
		}
		given[e.GetIndex()] = true
		entry := store.LentEntry{Key: a.keys[e.GetIndex()]}
		for _, n := range e.GetBytes() {
			if n == 0 || n%4096 != 0 || n > 1<<40 {
				return 0, fmt.Errorf("%w: a piece of %d bytes", ErrMessage, n)
			}
			entry.Bytes = append(entry.Bytes, int64(n))
		}
		lent.Entries, index = append(lent.Entries, entry), append(index, e.GetIndex())
	}
	if !r.GetBusy() {
		a.strike(given)
	}
	if len(index) == 0 {
		return 0, nil
	}
	lent.Name = func(entry int, rank uint32, bytes int64, name string) {
		p.fs.add(name, &piece{loan: l, entry: index[entry], rank: rank, bytes: bytes})
	}
	lasts := min(r.GetTime().AsDuration(), longestLease)
	l.lasts, l.due, l.ends = lasts, since.Add(min(unused, lasts/2)), since.Add(lasts)
	l.entries, err = p.store.Borrow(lent)
	entered = len(l.entries)
	x.mu.Lock()
	x.loans = append(x.loans, l) // tidy gives back what has no entry, and what comes when the peer is left alone
	x.mu.Unlock()
	if x.run.Err() != nil {
		x.giveBack(true)
	}
	return entered, err
}

// strike takes promises out of the table that were not kept.
func (a *Ask) strike(given []bool) {
	printer := kv.PrinterOf(a.lookup.Namespace.Digest, a.lookup.Group)
	for i, ok := range given {
		if ok {
			continue
		}
		a.peer.count.struck.Add(1)
		a.peer.owner.table.remove(printer.Print(&a.keys[i]), a.list)
		if a.leading { // what follows was not looked at
			return
		}
	}
}
