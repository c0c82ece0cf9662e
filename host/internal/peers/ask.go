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
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/kv"
)

// Ask is what peers promise of what a lookup has missed.
type Ask struct {
	lookup  store.LookupRequest
	leading bool // to each peer what follows a key that it lacks is of no use
	peers   []question
}

// question is what one peer is asked for.
type question struct {
	*Ask
	peer *peer
	list int
	keys []kv.Key
	busy bool // or gave no answer
}

// Promise says which peers promise what a lookup has not found, or nil: for a run as far as they and this host have it together, else every
// key. Hosts that keep a chunk once have a prompt's prefix in parts. It costs no message, and allocates nothing where there is no promise. What
// was busy when it was asked before for the same lookup is left out, so that another with the same is asked.
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
	var run []kv.Key // the latest keys that are promised
	has := uint64(0) // the peers that have all of them
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
			if p.reads.behind() > longestWait/2 { // as much is read as may be
				return nil
			}
			a, has = &Ask{lookup: *q, leading: leading}, also
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

// add asks a peer for keys, one that is asked already if it is among those that have them. It is false if none is to be asked for them.
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
	rotate := int(run[0][0]) % lists // those that promise as much take turns
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

// rests says that the peer is not asked just now, because it has lent nothing for long.
func (x *peer) rests() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.vain >= mostVain && time.Now().Before(x.again)
}

// answered follows an ask that has brought something, or nothing. Who is busy again and again, or promises what it has not, costs lookups a round
// trip each, so it is asked less and less often.
func (x *peer) answered(some, busy bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case some:
		x.vain, x.rest = 0, 0
		return
	case busy:
		x.vain += mostVain / 4
	default:
		x.vain++
	}
	if x.vain >= mostVain {
		x.rest = min(max(firstRest, 2*x.rest), longestRest)
		x.again = time.Now().Add(x.rest)
	}
}

func (x *peer) isApart(namespace kv.Digest, group uint32) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.apart[apartKey{namespace, group}]
}

// busy is the lists of peers that were, after Run.
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

// Run asks the peers for leases within the deadline, at once, and enters what they lend. It says whether there is more to be found now.
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
	default: // it has enough to answer
		a.busy = true
		return false
	}
	x.count.asks.Add(1)
	x.count.keys.Add(uint64(len(a.keys)))
	n, err := a.borrow(ctx, time.Now())
	switch {
	case err == nil:
		x.worked(asking)
	case ctx.Err() != nil || x.run.Err() != nil: // this host has ended it
	case errors.Is(err, ErrMessage):
		x.accuse("a peer's answer cannot be true", err)
	case status.Code(err) != codes.ResourceExhausted: // that says it is busy
		x.failed(asking, err)
	}
	x.answered(n > 0, a.busy || err != nil)
	if err != nil {
		a.busy = true
		x.owner.cfg.Log.Debug("a peer lends nothing", "peer", x.addr, "error", err)
	}
	return n > 0
}

// borrow enters what the peer lends, and returns how much that is: what another lookup has borrowed since is there too.
func (a *question) borrow(ctx context.Context, since time.Time) (n int, err error) {
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
		p.fs.add(name, &piece{loan: l, entry: index[entry], print: printer.Print(&a.keys[index[entry]]), rank: rank, bytes: bytes})
	}
	l.lasts, l.due, l.ends = lasts, since.Add(min(unused, lasts/2)), since.Add(lasts)
	marks, err := p.store.Borrow(lent)
	x.giving.Lock()
	l.entries = marks
	x.giving.Unlock()
	x.mu.Lock()
	x.loans = append(x.loans, l) // tidy gives back what has no entry
	here := x.state == Here
	x.mu.Unlock()
	if !here {
		x.giveBack()
	}
	return len(index), err
}

// soundSize says whether a piece's file may have so many bytes.
func soundSize(n uint64, class *catalog.Class) bool {
	return n > pageBytes && n%pageBytes == 0 && class != nil && n <= uint64(class.Bound())
}

// strike takes promises out of the table that were not kept.
func (a *question) strike(given []bool) {
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
