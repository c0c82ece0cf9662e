package peers

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// Ask holds the entries that a lookup missed and that peers promise.
type Ask struct {
	lookup  store.LookupRequest
	leading bool // the lookup needs a prefix: keys after the first missing one have no use
	peers   []question
	fs      *FS // of the borrowed entries
}

// question is the request to one peer.
type question struct {
	*Ask
	peer *peer
	list int
	keys []kv.Key
	busy bool // the peer was busy or did not answer
}

// Promise finds the peers that promise the missing entries of a lookup. It returns nil if there are none. For a leading lookup
// it considers the run of keys that this host and its peers have together, since hosts that keep one copy of a chunk hold a
// prompt's prefix in parts; for others it considers every missing key. It sends no message and allocates nothing unless there
// is a promise. The argument before is the earlier Ask for the same lookup, or nil: peers that were busy then are left out, so
// that others with the same entries are asked.
func (p *Peers) Promise(q *store.LookupRequest, found *store.Lease, leading bool, before *Ask) *Ask {
	if p == nil || q.Pin {
		return nil
	}
	usable := p.usable.Load() &^ before.busy()
	if usable == 0 || found.Hits() == len(q.Keys) {
		return nil
	}
	printer := kv.PrinterOf(q.Namespace.Digest, q.Group)
	var a *Ask
	var run []kv.Key // consecutive keys that the same peers promise
	has := uint64(0) // bitmap of the peers that promise all keys of run
	at := 0
	if leading {
		at = found.Hits()
	}
	for ; at < len(q.Keys); at++ {
		if !leading && found.Has(at) {
			continue
		}
		fp := printer.Print(&q.Keys[at])
		also := usable & p.table.at(fp)
		if also == 0 {
			if !leading || a != nil && p.store.Has(fp) {
				continue
			}
			break
		}
		if a == nil {
			if p.reads.behind() > longestWait/2 { // reads from peers are near the bandwidth limit
				return nil
			}
			a, has = &Ask{lookup: *q, leading: leading, fs: p.fs}, also
			a.lookup.Keys = nil
		}
		if has&also == 0 {
			if !a.add(p, has, run) && leading {
				run = nil
				break
			}
			has, run = also, nil
		}
		has, run = has&also, append(run, q.Keys[at])
	}
	if a == nil {
		return nil
	}
	if a.add(p, has, run); len(a.peers) == 0 {
		return nil
	}
	return a
}

// add asks one of the given peers for a run of keys. It prefers a peer that is asked already. It returns false if none of them
// can be asked.
func (a *Ask) add(p *Peers, has uint64, run []kv.Key) bool {
	if len(run) == 0 {
		return true
	}
	for i := range a.peers {
		if t := &a.peers[i]; has&(1<<t.list) != 0 {
			t.keys = append(t.keys, run[:min(len(run), mostKeys-len(t.keys))]...)
			return true
		}
	}
	rotate := int(run[0][0]) % lists // spreads the requests over the peers that have the run
	for has != 0 {
		list := (bits.TrailingZeros64(bits.RotateLeft64(has, -rotate)) + rotate) % lists
		x := p.of[list].Load()
		if x != nil && !x.rests() && !x.isApart(a.lookup.Namespace.Digest, a.lookup.Group) {
			a.peers = append(a.peers, question{Ask: a, peer: x, list: list, keys: run[:min(len(run), mostKeys)]})
			return true
		}
		has &^= 1 << list
	}
	return false
}

// busy returns the lists of the peers that were busy during Run, as a bitmap.
func (a *Ask) busy() (lists uint64) {
	if a != nil {
		for i := range a.peers {
			if a.peers[i].busy {
				lists |= 1 << a.peers[i].list
			}
		}
	}
	return lists
}

// Run asks the peers for leases in parallel, within the deadline, and enters the loans into the store. It reports whether a
// repeated lookup would find more.
func (a *Ask) Run(ctx context.Context) bool {
	var more atomic.Bool
	var others sync.WaitGroup
	ask := func(t *question) {
		if t.ask(ctx) {
			more.Store(true)
		}
	}
	for i := range a.peers[1:] {
		others.Go(func() { ask(&a.peers[1+i]) })
	}
	ask(&a.peers[0])
	others.Wait()
	return more.Load()
}

func (a *question) ask(ctx context.Context) bool {
	x := a.peer
	select {
	case x.asks <- struct{}{}:
		defer func() { <-x.asks }()
	default: // the peer has asksAtOnce requests to answer
		a.busy = true
		return false
	}
	within, stop := context.WithTimeout(ctx, x.owner.cfg.Deadline)
	defer stop()
	since := time.Now()
	n, err := a.borrow(within, since)
	if (a.busy || status.Code(err) == codes.ResourceExhausted) && x.makeRoom(within) {
		more, again := a.borrow(within, time.Now())
		if n += more; again == nil || errors.Is(again, ErrMessage) {
			err = again
		}
	}
	switch {
	case err == nil:
		x.worked(asking)
	case ctx.Err() != nil || x.run.Err() != nil: // this host cancelled the request
	case errors.Is(err, ErrMessage):
		x.accuse("a peer's answer cannot be true", err)
	case status.Code(err) != codes.ResourceExhausted: // ResourceExhausted only says that the peer is busy
		x.failed(asking, since, err)
	}
	x.answered(n > 0, a.busy || err != nil)
	if err != nil {
		a.busy = true
		x.owner.cfg.Log.Debug("a peer lends nothing", "peer", x.addr, "error", err)
	}
	return n > 0
}

// borrow requests a lease and enters the lent entries into the store. It returns the number of lent entries, including those
// that another lookup has borrowed since. The keys that a busy peer has not lent are left in a.
func (a *question) borrow(ctx context.Context, since time.Time) (n int, err error) {
	x, p := a.peer, a.peer.owner
	x.count.asks.Add(1)
	x.count.keys.Add(uint64(len(a.keys)))
	client, err := x.client(false)
	if err != nil {
		return 0, err
	}
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
	lasts := min(r.GetTime().AsDuration(), q.GetTime().AsDuration(), longestLease)
	if len(r.GetEntries()) > 0 && lasts < leastLease {
		return 0, fmt.Errorf("%w: a lease for %s", ErrMessage, lasts)
	}
	ranks, class := bits.OnesCount64(a.lookup.Ranks), a.lookup.Namespace.Class(a.lookup.Group)
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
			if !soundSize(n, class) {
				return 0, fmt.Errorf("%w: a piece of %d bytes, where one takes %d here", ErrMessage, n, class.FileBytes())
			}
			entry.Bytes = append(entry.Bytes, int64(n))
		}
		lent.Entries, index = append(lent.Entries, entry), append(index, e.GetIndex())
	}
	if a.busy = r.GetBusy(); !a.busy {
		a.strike(given)
	}
	if len(index) == 0 {
		return 0, nil
	}
	printer := class.Printer
	lent.Name = func(entry int, rank uint32, bytes int64, name string) {
		a.fs.add(name, &piece{loan: l, entry: index[entry], print: printer.Print(&a.keys[index[entry]]), rank: rank, bytes: bytes})
	}
	l.lasts, l.since, l.ends = lasts, since, since.Add(lasts)
	marks, err := p.store.Borrow(lent)
	if a.busy {
		a.keys = a.missing(given)
	}
	x.giving.Lock()
	l.entries = marks
	x.giving.Unlock()
	x.mu.Lock()
	x.loans = append(x.loans, l) // tidy returns the lease if no entry was entered
	here := x.state == Here
	x.mu.Unlock()
	if !here {
		x.giveBack()
	}
	return len(index), err
}

// missing returns the keys that were not given.
func (a *question) missing(given []bool) (keys []kv.Key) {
	for i, ok := range given {
		if !ok {
			keys = append(keys, a.keys[i])
		}
	}
	return keys
}

// strike removes the promises of keys that the peer did not lend from the table.
func (a *question) strike(given []bool) {
	printer := kv.PrinterOf(a.lookup.Namespace.Digest, a.lookup.Group)
	for i, ok := range given {
		if ok {
			continue
		}
		a.peer.count.struck.Add(1)
		a.peer.owner.table.remove(printer.Print(&a.keys[i]), a.list)
		if a.leading { // the lender did not look at the keys after the first missing one
			return
		}
	}
}
