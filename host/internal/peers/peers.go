package peers

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
)

// Config makes a host one among peers.
type Config struct {
	Hosts         []string // host:port of the others; a name may have several addresses, and this host may be among them
	Listen        string   // empty: it lends nothing
	Cert, Key, CA string   // PEM files; empty: no TLS, and only loopback addresses

	Deadline  time.Duration // of a lease
	Bandwidth int64         // most bytes a second that are lent, and that are read from others; 0: no limit
	LeaseTime time.Duration // that a lookup's lease may last here
	// Budget is what one read may take: 12 s. It is to be less than the limit of an operation on files, so that a slow peer is not
	// taken for a file system that hangs.
	Budget time.Duration
	Memory int64  // that callers may have this host hold: [Memory]
	NIXL   string // what [nixl.Open] takes; empty: bytes go by gRPC alone
	Dry    bool   // New looks whether Listen is free, and lends nothing there
	Log    *slog.Logger
}

const (
	resolveEvery = time.Minute
	tidyEvery    = 250 * time.Millisecond
)

// Peers are the other hosts, and this host's part among them. A nil one has none. It is safe for concurrent use.
type Peers struct {
	cfg      Config
	id       *identity
	self     [16]byte
	fs       *FS
	table    Table
	usable   atomic.Uint64        // lists that count
	taker    atomic.Pointer[peer] // that what is evicted here is offered to, or nil
	turn     int                  // of those that take as long; tidy's
	patience time.Duration        // with an offer
	of       [lists]atomic.Pointer[peer]
	store    *store.Store
	listener net.Listener // nil: it lends nothing
	lending  *lending
	pause    time.Duration // the first one of a peer that is left alone
	nixl     *nixlWay      // nil: bytes go by gRPC alone
	reads    pace          // of what is fetched, from all peers

	addresses atomic.Pointer[map[string]bool] // of the configuration's hosts

	run  context.Context
	stop context.CancelFunc
	work sync.WaitGroup

	mu    sync.Mutex
	peers map[string]*peer // by address
	lost  map[string]error // names that have no address
}

// New listens, and calls no peer yet.
func New(cfg Config) (*Peers, error) {
	p := &Peers{cfg: cfg, peers: map[string]*peer{}, lost: map[string]error{}, pause: firstPause, patience: offerTime,
		reads: pace{rate: float64(cfg.Bandwidth)}}
	if p.cfg.Log == nil {
		p.cfg.Log = slog.New(slog.DiscardHandler)
	}
	p.cfg.LeaseTime, p.cfg.Budget = cmp.Or(cfg.LeaseTime, time.Minute), cmp.Or(cfg.Budget, 12*time.Second)
	if _, err := rand.Read(p.self[:]); err != nil {
		return nil, err
	}
	var err error
	if p.id, err = newIdentity(cfg.Cert, cfg.Key, cfg.CA, p.cfg.Log); err != nil {
		return nil, err
	}
	if p.fs, err = newFS(); err != nil {
		return nil, err
	}
	p.run, p.stop = context.WithCancel(context.Background())
	if cfg.NIXL != "" {
		var err error
		if p.nixl, err = newWay(cfg.NIXL, p.self, p.cfg.Log); err != nil {
			p.cfg.Log.Warn("peers are read by gRPC alone", "setting", "peers.nixl", "error", err)
		}
	}
	if cfg.Listen != "" {
		if p.listener, err = net.Listen("tcp", cfg.Listen); err != nil {
			err = fmt.Errorf("%w: %w", ErrListen, err)
		} else if p.id == nil && !isLoopback(p.listener.Addr().String()) {
			err = errors.Join(fmt.Errorf("%w: %w: peers.listen %s", ErrConfig, ErrPlaintext, cfg.Listen), p.listener.Close())
		}
		if err == nil && cfg.Dry {
			err, p.listener = p.listener.Close(), nil
		}
		if err != nil {
			return nil, errors.Join(err, p.nixl.close(), p.fs.Close())
		}
	}
	return p, nil
}

// Budgets are what callers hold of this host, with at most so many of them.
func (p *Peers) Budgets(most int) []budget.Figures {
	if p == nil || p.lending == nil {
		return nil
	}
	return []budget.Figures{p.lending.memory.Figures(most)}
}

// Deadline is of all that one lookup asks.
func (p *Peers) Deadline() time.Duration { return p.cfg.Deadline }

// Addr is where this host lends; empty if it does not.
func (p *Peers) Addr() string {
	if p == nil || p.listener == nil {
		return ""
	}
	return p.listener.Addr().String()
}

// Root is the root of what is lent, behind all others.
func (p *Peers) Root(level int) store.RootConfig {
	return store.RootConfig{Path: Path, Medium: store.Medium{FS: p.fs, Traits: store.Lent, Lender: p}, Capacity: Capacity,
		MaxEntries: MostEntries, Level: level, ForPieces: true}
}

// Start lends what a store has, and borrows for it.
func (p *Peers) Start(s *store.Store) {
	p.store = s
	if p.listener != nil {
		p.lending = newLending(p)
		p.work.Go(func() { p.lending.serve(p.listener) })
	}
	p.work.Go(func() { p.resolve() })
	p.work.Go(func() { p.tidy() })
}

// Close ends all that Start has begun. What is being fetched fails.
func (p *Peers) Close() error {
	if p == nil {
		return nil
	}
	p.stop()
	var err error
	if p.lending != nil {
		p.lending.close()
	} else if p.listener != nil {
		err = p.listener.Close()
	}
	p.work.Wait()
	err = errors.Join(err, p.nixl.close())
	if p.lending != nil {
		err = errors.Join(err, p.lending.shelf.close())
	}
	return err
}

// CloseFiles frees the file system, which no store uses any more.
func (p *Peers) CloseFiles() error {
	if p == nil {
		return nil
	}
	return p.fs.Close()
}

// resolve finds the addresses of the hosts, again and again, and keeps one peer for each.
func (p *Peers) resolve() {
	tick := time.NewTicker(resolveEvery)
	defer tick.Stop()
	for {
		p.settle()
		select {
		case <-tick.C:
		case <-p.run.Done():
			return
		}
	}
}

// settle begins peers of new addresses and ends those of addresses that are no more. A name that does not resolve keeps what it had.
func (p *Peers) settle() {
	found, kept := map[string]string{}, map[string]bool{} // names by address
	for _, name := range p.cfg.Hosts {
		host, port, err := net.SplitHostPort(name)
		var list []string
		if err == nil {
			list, err = net.DefaultResolver.LookupHost(p.run, host)
		}
		for _, ip := range list {
			if at := net.JoinHostPort(ip, port); p.id == nil && !isLoopback(at) {
				err = fmt.Errorf("%w: %s is %s", ErrPlaintext, name, ip)
			} else {
				found[at] = name
			}
		}
		p.mu.Lock()
		if was := p.lost[name]; err != nil && (was == nil || was.Error() != err.Error()) && p.run.Err() == nil {
			p.cfg.Log.Warn("a peer cannot be reached", "peer", name, "error", err)
		}
		if delete(p.lost, name); err != nil {
			p.lost[name], kept[name] = err, true
		}
		p.mu.Unlock()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for at, x := range p.peers {
		if found[at] == "" && !kept[x.name] {
			x.stop()
			delete(p.peers, at)
		}
	}
	for at, name := range found {
		if p.peers[at] == nil && p.run.Err() == nil {
			x := newPeer(p, name, at)
			p.peers[at] = x
			p.work.Go(x.live)
		}
	}
	known := map[string]bool{}
	for at := range p.peers {
		known[hostOf(at)] = true
	}
	if p.addresses.Store(&known); p.lending != nil {
		p.lending.shares.expect(len(known))
	}
}

// all are the peers, by address.
func (p *Peers) all() (list []*peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, at := range slices.Sorted(maps.Keys(p.peers)) {
		list = append(list, p.peers[at])
	}
	return list
}

// tidy gives back what is not used any more, and tries peers again that were left alone.
func (p *Peers) tidy() {
	tick := time.NewTicker(tidyEvery)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			list := p.all()
			for _, x := range list {
				x.tidy(now)
			}
			p.chooseTaker(list)
		case <-p.run.Done():
			return
		}
	}
}

// Blame implements [store.Lender].
func (p *Peers) Blame(name string, cause error) {
	if c := p.fs.piece(name); c != nil {
		c.loan.peer.blame(c.loan, name, cause)
	}
}

func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return err == nil && ip != nil && ip.IsLoopback()
}

// service implements the gRPC service.
type service struct {
	proto.UnimplementedPeerServiceServer
	*lending
}

const (
	window    = 8 << 20
	ioBuffer  = 256 << 10
	mostKeys  = 1 << 16
	mostBytes = 4 << 20 // of a message
)

// dial makes a connection that is opened when it is used.
func (p *Peers) dial(name, addr string) (*grpc.ClientConn, error) {
	host, _, err := net.SplitHostPort(name)
	if err != nil {
		return nil, err
	}
	return grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(p.id.calling(host)), grpc.WithNoProxy(),
		grpc.WithKeepaliveParams(aliveParams), grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(2*window),
		grpc.WithReadBufferSize(ioBuffer), grpc.WithWriteBufferSize(ioBuffer), grpc.WithConnectParams(connectParams),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(mostBytes)))
}
