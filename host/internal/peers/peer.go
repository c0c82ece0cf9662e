package peers

import (
	"context"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

const (
	mostFailures  = 3
	longestPause  = 30 * time.Second
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

// borrowing is the part of this host that borrows from peers.
type borrowing struct {
	*host
	table  Table
	usable atomic.Uint64 // bitmap of the lists that Promise considers
	of     [lists]atomic.Pointer[peer]
	pause  time.Duration // first pause of a peer that is left alone
	reads  pace          // limits the bytes read from all peers

	mu    sync.Mutex
	peers map[string]*peer // by address
}

// all returns the peers in the order of their addresses.
func (b *borrowing) all() (list []*peer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, at := range slices.Sorted(maps.Keys(b.peers)) {
		list = append(list, b.peers[at])
	}
	return list
}

// Copies implements [store.Lender].
func (b *borrowing) Copies(fp uint64) int { return bits.OnesCount64(b.table.at(fp) & b.usable.Load()) }

// named returns the peer with a host id, or nil if it is not connected. A host draws a new id at each start.
func (b *borrowing) named(host [16]byte) *peer {
	for _, x := range b.all() {
		x.mu.Lock()
		is := x.host == host && x.state == Here
		x.mu.Unlock()
		if is {
			return x
		}
	}
	return nil
}

// peer is another host at one of its addresses.
type peer struct {
	owner      *borrowing
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

func newPeer(b *borrowing, name, addr string) *peer {
	x := &peer{owner: b, name: name, addr: addr, state: Away, list: lists, asks: make(chan struct{}, asksAtOnce), apart: map[apartKey]bool{}}
	x.run, x.stop = context.WithCancel(b.run)
	return x
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

// loan is a lease that a peer has granted.
type loan struct {
	peer      *peer
	lease     uint64
	namespace kv.Digest
	group     uint32
	entries   []store.Borrowed
	since     time.Time // the time of the request
	ends      time.Time // the time from which all entries are returned
	lasts     time.Duration
	renewing  bool // a request to extend the loan is under way
	hearsay   bool // the offer came from an address that is not the peer's; its failures are not held against the peer
}

// agent returns the name of the peer's NIXL agent, or an empty string if it has none.
func (x *peer) agent() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.host == [16]byte{} {
		return ""
	}
	return hex.EncodeToString(x.host[:])
}

// spend notes a slot of the peer that this host has finished reading.
func (x *peer) spend(slot uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.slots = append(x.slots, slot)
}

// spent takes the noted slots, to tell the peer.
func (x *peer) spent() (list []uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	list, x.slots = x.slots, nil
	return list
}

// rests reports whether the peer is not asked for now because its last answers brought nothing.
func (x *peer) rests() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.vain >= mostVain && time.Now().Before(x.again)
}

// answered records whether a request brought entries. A peer that is busy again and again, or that promises entries it does not
// have, costs each lookup a round trip. Such a peer is asked less and less often.
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
