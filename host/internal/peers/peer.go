package peers

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

const (
	mostFailures  = 3
	firstPause    = time.Second
	longestPause  = 30 * time.Second
	stall         = 2 * time.Second // longest time without a byte during a read
	asksAtOnce    = 64
	dataLines     = 4 // connections for bytes, in addition to the one for leases
	returnTimeout = time.Second
	mostVain      = 16 // requests without a result, after which the peer is asked less often; a busy answer counts as a quarter of them
	firstRest     = 50 * time.Millisecond
	longestRest   = 5 * time.Second
	learnEffort   = 10 * time.Microsecond // estimate of the processor time that a message of the peer's list takes
	printEffort   = 50 * time.Nanosecond  // the same for each fingerprint in it
	unused        = 2 * time.Second       // time for which a loan without a local lease is kept for the next lookup
)

var (
	aliveParams   = keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}
	connectParams = grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2,
		MaxDelay: 5 * time.Second}, MinConnectTimeout: 2 * time.Second}
)

// State is the state of a peer.
type State string

// States of a peer.
const (
	Away  State = "away"  // not connected, or its entries are not known yet
	Here  State = "here"  // connected; lookups ask it
	Alone State = "alone" // left alone for a time after failures or wrong bytes
	Self  State = "self"  // the address belongs to this host
	Twin  State = "twin"  // another address leads to the same host
)

// peer is another host at one of its addresses.
type peer struct {
	owner      *Peers
	name, addr string
	run        context.Context
	stop       context.CancelFunc
	asks       chan struct{} // one element for each request under way
	next       atomic.Uint32 // counter that selects the connection for bytes
	turnover   atomic.Int64  // time in which the peer replaces its content, as announced; 0 if it takes no offers
	giving     sync.Mutex    // held by giveBack, so that a call that must end all loans finds those that another call is working on

	mu       sync.Mutex
	lines    []*grpc.ClientConn  // the first is for leases, the others are for bytes
	chain    []*x509.Certificate // certificates of the peer; nil without TLS
	host     [16]byte
	state    State
	reason   string
	list     int        // index of the peer's list in the table; lists if the peer has none
	failures [deeds]int // failures in a row, of each deed
	failedAt time.Time  // when the last failure of asking was counted
	pause    time.Duration
	until    time.Time // end of the pause in state Alone
	trying   bool      // a probe is under way
	heard    time.Time
	loans    []*loan
	owed     []uint64          // leases that are to be returned again after a failure
	apart    map[apartKey]bool // namespaces and groups that the peer stores in a layout unknown to this host
	slots    []uint64          // slots of the peer that were read and have not been reported to it
	vain     int               // requests in a row that brought nothing; a busy answer counts as several
	rest     time.Duration     // pause after the last of them
	again    time.Time         // end of that pause

	count peerCounters
}

type apartKey struct {
	namespace kv.Digest
	group     uint32
}

// deed is a kind of request. Failures are counted for each kind, so a good answer to one does not make up for failures of the
// other.
type deed int

const (
	asking deed = iota
	reading
	deeds
)

// peerCounters counts since the start.
type peerCounters struct {
	asks, failures, keys, struck, bytes, blamed, offers, taken, nixl, fallbacks atomic.Uint64
}

func newPeer(p *Peers, name, addr string) *peer {
	x := &peer{owner: p, name: name, addr: addr, state: Away, list: lists, asks: make(chan struct{}, asksAtOnce), apart: map[apartKey]bool{}}
	x.run, x.stop = context.WithCancel(p.run)
	return x
}

// live keeps the stream of the peer's residents open, and reopens it with growing pauses after it breaks.
func (x *peer) live() {
	log := x.owner.cfg.Log.With("peer", x.addr)
	defer x.close()
	for pause := firstPause; x.run.Err() == nil; pause = min(2*pause, longestPause) {
		line, err := x.dial()
		if err == nil {
			if err = x.listen(line); x.leave(err) {
				pause = firstPause
				log.Warn("a peer has gone", "error", err)
			}
			if status.Code(err) == codes.PermissionDenied { // this host may have renewed its certificate since the connection was made
				x.hangUp()
			}
		}
		switch {
		case x.is(Self):
			<-x.run.Done()
			return
		case x.is(Twin): // wait for the other address to go away
			pause = longestPause
		}
		select {
		case <-time.After(pause):
		case <-x.run.Done():
		}
	}
}

// dial creates the missing connections and returns the first.
func (x *peer) dial() (*grpc.ClientConn, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for len(x.lines) < 1+dataLines {
		line, err := x.owner.dial(x.name, x.addr)
		if err != nil {
			return nil, err
		}
		x.lines = append(x.lines, line)
	}
	return x.lines[0], nil
}

// client returns a connection: the first for leases, or the next of the others for bytes.
func (x *peer) client(data bool) (proto.PeerServiceClient, error) {
	n := 0
	if data {
		n = 1 + int(x.next.Add(1)%dataLines)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.lines) <= n || x.state != Here {
		return nil, fmt.Errorf("%w: %s is %s", ErrAway, x.addr, x.state)
	}
	return proto.NewPeerServiceClient(x.lines[n]), nil
}

// listen applies the stream of the peer's residents to the table until the stream ends.
func (x *peer) listen(line *grpc.ClientConn) error {
	ctx, stop := context.WithCancel(x.run)
	defer stop()
	stream, err := proto.NewPeerServiceClient(line).Residents(ctx, &proto.ResidentsRequest{})
	if err != nil {
		return err
	}
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	x.mu.Lock()
	x.chain = shown(stream.Context())
	x.mu.Unlock()
	if len(m.GetHost()) != len(x.host) {
		return fmt.Errorf("%w: it does not say who it is", ErrMessage)
	}
	list, ok := x.owner.table.open()
	if !ok {
		return fmt.Errorf("%w: %d peers are the most", ErrConfig, lists)
	}
	if x.owner.who(x, list, [16]byte(m.GetHost())) != Away {
		return nil
	}
	for {
		if err := x.owner.table.learn(list, m.GetAdded(), m.GetRemoved()); err != nil {
			return err
		}
		x.owner.effort.Spend(ctx, arrivals.Sender{ID: x.addr}, learnEffort+printEffort*time.Duration(len(m.GetAdded())+len(m.GetRemoved()))/8)
		if m.Turnover != nil {
			x.turnover.Store(int64(turnoverOf(m.GetTurnover())))
		}
		switch w := x.owner.nixl; {
		case len(m.GetNixl()) > mostMetadata:
			return fmt.Errorf("%w: %d bytes of NIXL's metadata", ErrMessage, len(m.GetNixl()))
		case w != nil && len(m.GetNixl()) > 0 && x.agent() != "":
			w.learn(x.agent(), m.GetNixl())
		}
		x.mu.Lock()
		x.heard = time.Now()
		if m.GetWhole() && x.state == Away {
			x.state, x.reason, x.failures = Here, "", [deeds]int{}
			clear(x.apart)
			x.owner.of[list].Store(x)
			x.owner.usable.Or(1 << list)
			x.owner.cfg.Log.Info("a peer is here", "peer", x.addr, "entries", x.owner.table.count[list].Load())
		}
		x.mu.Unlock()
		if m, err = stream.Recv(); err != nil {
			return err
		}
	}
}

// who assigns a list to a peer and identifies its host. It returns Self if the host is this one, and Twin if another address
// already leads to the host. The other address counts only if its certificate is valid for this name, too, or without TLS.
// Otherwise one of the two peers pretends to be the other: the peer is used, but gets no host id and no NIXL.
func (p *Peers) who(x *peer, list int, host [16]byte) State {
	p.mu.Lock()
	defer p.mu.Unlock()
	state, said := Away, false
	for _, o := range p.peers {
		o.mu.Lock()
		if o != x && o.host == host && o.list < lists {
			if said = true; len(o.chain) == 0 || p.id.verify(o.chain, hostOf(x.name)) == nil {
				state = Twin
			}
		}
		o.mu.Unlock()
	}
	if host == p.self {
		state = Self
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.list, x.host, x.state = list, [16]byte{}, state
	if state == Away && !said {
		x.host = host
	} else if state == Away {
		p.cfg.Log.Warn("a peer says that it is the host of another, and has no certificate for that", "peer", x.addr)
	}
	return state
}

// leave drops all knowledge of the peer's entries. It reports whether the peer was connected.
func (x *peer) leave(cause error) (was bool) {
	x.mu.Lock()
	was = x.state == Here || x.state == Alone
	if was || x.state == Away {
		x.state = Away
	}
	if cause != nil {
		x.reason = status.Convert(cause).Message()
	}
	list := x.list
	x.mu.Unlock()
	if list < lists {
		if w := x.owner.nixl; w != nil {
			w.drop(x.agent()) // while the peer still owns the name of the agent
		}
		x.mu.Lock()
		x.list = lists
		x.mu.Unlock()
		x.owner.usable.And(^(uint64(1) << list))
		x.owner.of[list].Store(nil)
		x.owner.table.drop(list)
	}
	x.giveBack()
	return was
}

func (x *peer) close() {
	x.leave(nil)
	x.hangUp()
}

// hangUp closes the connections. The next dial creates new ones.
func (x *peer) hangUp() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, line := range x.lines {
		_ = line.Close() // an error has no consequence
	}
	x.lines, x.chain = nil, nil
}

func (x *peer) is(s State) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.state == s
}

// worked records an answer in time.
func (x *peer) worked(at deed) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failures[at] = 0; x.failures == [deeds]int{} {
		x.pause = 0
	}
}

// failed records a failure of a request that began at a time, unless this host caused it by a cancellation. A peer that fails several
// times in a row is left alone. Questions that were asked at the same time are one of them: what delayed one of them, such as a
// pause of this process, has delayed all.
func (x *peer) failed(at deed, since time.Time, err error) {
	if x.run.Err() != nil { // this host is closing the peer
		return
	}
	x.count.failures.Add(1)
	x.mu.Lock()
	switch {
	case at == reading:
		x.failures[at]++
	case since.After(x.failedAt): // a failure that is not counted must not move the time, or questions that overlap would never count
		x.failures[at]++
		x.failedAt = time.Now()
	}
	over := (x.failures[at] >= mostFailures || errors.Is(err, errSilent)) && x.state == Here
	if over {
		x.pause = min(max(x.owner.pause, 2*x.pause), longestPause)
	}
	pause := x.pause
	x.mu.Unlock()
	if over {
		x.leaveAlone(pause, err)
	}
}

// blame records a piece that was wrong or could not be read.
func (x *peer) blame(l *loan, name string, cause error) {
	if l.hearsay || errors.Is(cause, ErrAway) {
		return // for ErrAway, the read has already counted the failure
	}
	if errors.Is(cause, pieceformat.ErrUnknownPlan) {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.apart[apartKey{l.namespace, l.group}] = true
		x.owner.cfg.Log.Warn("a peer stores chunks in a layout that is not known here: they are not asked for", "peer", x.addr,
			"namespace", l.namespace, "group", l.group)
		return
	}
	x.accuse("a peer has sent wrong bytes", fmt.Errorf("%s: %w", name, cause))
}

// accuse logs a peer that has sent something impossible or wrong, and leaves it alone.
func (x *peer) accuse(what string, cause error) {
	x.count.blamed.Add(1)
	x.owner.cfg.Log.Error(what+": it is left alone for a while", "peer", x.addr, "error", cause)
	x.leaveAlone(longestPause, fmt.Errorf("%s: %w", what, cause))
}

// missed makes an entry a miss after its bytes did not come, until the peer announces the entry again.
func (x *peer) missed(p *piece) {
	x.mu.Lock()
	list := x.list
	x.mu.Unlock()
	if p.print == 0 || list == lists {
		return
	}
	x.owner.table.remove(p.print, list)
	x.giving.Lock()
	defer x.giving.Unlock()
	i := slices.IndexFunc(p.loan.entries, func(m store.Borrowed) bool { return m.Fingerprint == p.print })
	if i >= 0 {
		x.owner.store.GiveBack(p.loan.entries[i:i+1:i+1], true)
		p.loan.entries = slices.Delete(p.loan.entries, i, i+1)
	}
}

// leaveAlone stops requests to the peer for a time.
func (x *peer) leaveAlone(pause time.Duration, cause error) {
	x.mu.Lock()
	if x.state == Here {
		x.state, x.reason, x.until = Alone, cause.Error(), time.Now().Add(pause)
		x.owner.usable.And(^(uint64(1) << x.list))
		x.owner.cfg.Log.Warn("a peer is left alone", "peer", x.addr, "for", pause, "error", cause)
	}
	x.mu.Unlock()
	// The loans end later, in tidy: the caller may hold an entry, and its removal would wait for the caller.
}

// tidy returns loans that are due, repeats failed returns, and probes the peer after a pause.
func (x *peer) tidy(now time.Time) {
	x.mu.Lock()
	chain := x.chain
	x.mu.Unlock()
	if chain != nil && x.owner.id.verify(chain, hostOf(x.name)) != nil {
		x.hangUp()
	}
	x.mu.Lock()
	here := x.state == Here
	if x.state == Alone && now.After(x.until) && !x.trying {
		x.trying = true
		x.owner.work.Go(x.tryAgain)
	}
	var owed []uint64
	if here {
		owed, x.owed = x.owed, nil
	}
	x.mu.Unlock()
	if len(owed) > 0 {
		x.owner.work.Go(func() {
			for _, lease := range owed {
				x.giveLease(lease, nil)
			}
		})
	}
	x.giveBack()
	if w := x.owner.nixl; w != nil && here {
		w.prove(x)
	}
	if done := x.spent(); here && done != nil {
		x.owner.work.Go(func() { x.giveLease(0, done) })
	}
}

// tryAgain probes the peer and ends its pause if it answers. The probe runs in the background, so that no lookup waits for it.
func (x *peer) tryAgain() {
	x.mu.Lock()
	lines := x.lines
	x.mu.Unlock()
	err := ErrAway
	if len(lines) > 0 {
		ctx, stop := context.WithTimeout(x.run, x.owner.cfg.Deadline)
		defer stop()
		_, err = proto.NewPeerServiceClient(lines[0]).Return(ctx, &proto.ReturnRequest{})
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.trying = false
	switch {
	case x.state != Alone:
	case err != nil:
		x.pause = min(max(x.owner.pause, 2*x.pause), longestPause)
		x.until = time.Now().Add(x.pause)
	default:
		x.state, x.reason, x.failures = Here, "", [deeds]int{mostFailures - 1, mostFailures - 1} // one more failure is enough to leave it alone again
		x.owner.usable.Or(1 << x.list)
	}
}

// loan is a lease that a peer has granted.
type loan struct {
	peer      *peer
	lease     uint64
	namespace kv.Digest
	group     uint32
	entries   []store.Borrowed
	due, ends time.Time // due: entries without a local lease are returned from then on; ends: all are
	lasts     time.Duration
	renewing  bool // a request to extend the loan is under way
	hearsay   bool // the offer came from an address that is not the peer's; its failures are not held against the peer
}

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

// read reads bytes of a piece from its lender, by NIXL if possible.
func (p *piece) read(dst []byte, off int64) (err error) {
	x, all := p.loan.peer, len(dst)
	if err := x.owner.reads.wait(x.run, int64(all), x.owner.cfg.Budget/2); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	client, err := x.client(true)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(x.run)
	defer stop(nil)
	quiet := newSilence(min(stall, x.owner.cfg.Budget), stop)
	defer quiet.end()
	slow := time.AfterFunc(x.owner.cfg.Budget, func() { stop(fmt.Errorf("%w: not all bytes in %s", ErrAway, x.owner.cfg.Budget)) })
	defer slow.Stop()
	defer func() {
		if err == nil {
			x.count.bytes.Add(uint64(all))
			x.worked(reading)
			return
		}
		cause := context.Cause(ctx)
		_, refused := status.FromError(err) // the peer itself answered with an error
		refused = refused && cause == nil && status.Code(err) != codes.Unavailable
		var held staging.Held // the error of a READ already carries the cause
		if cause != nil && x.run.Err() == nil && !errors.As(err, &held) {
			err = cause
		}
		if !errors.Is(err, ErrMessage) {
			err = fmt.Errorf("%w: %s: %w", ErrAway, x.addr, err)
		}
		offered := p.loan.lasts == 0 // an offered loan ends soon, so NotFound is no failure
		if !p.loan.hearsay && (!offered || status.Code(err) != codes.NotFound) {
			x.failed(reading, time.Time{}, err)
			if refused { // A silent peer is not treated like this: it still has its entries when it goes on, and would not announce them again.
				x.owner.work.Go(func() { x.missed(p) }) // in the background: the reader holds the entry
			}
		}
	}()
	if did, err := p.readByNIXL(ctx, dst, off, quiet.heard); did {
		return err
	}
	stream, err := client.Fetch(ctx, &proto.FetchRequest{Lease: p.loan.lease, Index: p.entry, Rank: p.rank, Offset: uint64(off),
		Bytes: uint64(len(dst))}, grpc.ForceCodecV2(byParts))
	if err != nil {
		return err
	}
	for m := (parted{dst: dst}); len(m.dst) > 0; m.dst = m.dst[m.have:] {
		if err := stream.RecvMsg(&m); m.bad != nil {
			return m.bad
		} else if err != nil {
			return err
		}
		quiet.heard()
	}
	return nil
}

// silenceSteps is the number of steps in the longest time without a byte.
const silenceSteps = 8

// silence ends a read to which no byte comes. It counts time in steps, and a step that ends late once: while this process was stopped
// or had no processor, it would not have seen what the peer sent.
type silence struct {
	step  time.Duration
	stop  func(cause error)
	steps atomic.Int32 // without a byte

	mu    sync.Mutex
	timer *time.Timer
	over  bool
}

// newSilence calls stop after the longest time without a byte.
func newSilence(longest time.Duration, stop func(cause error)) *silence {
	q := &silence{step: longest / silenceSteps, stop: stop}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.timer = time.AfterFunc(q.step, q.pass)
	return q
}

// pass ends a step.
func (q *silence) pass() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.over {
		return
	}
	if q.steps.Add(1) >= silenceSteps {
		q.stop(fmt.Errorf("%w for %s", errSilent, silenceSteps*q.step))
		return
	}
	q.timer.Reset(q.step)
}

// heard records that bytes have come. The step in which they come is not counted, as it may end at once.
func (q *silence) heard() { q.steps.Store(-1) }

func (q *silence) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.over = true
	q.timer.Stop()
}

// turnoverOf converts the result of [Peers.turnover] to a duration.
func turnoverOf(ms uint64) time.Duration {
	return time.Duration(min(ms, math.MaxInt64/uint64(time.Millisecond))) * time.Millisecond
}
