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
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
)

// Config configures the exchange with peers.
type Config struct {
	Hosts         []string // host:port of the peers; a name may have several addresses, and this host's own address is skipped
	Listen        string   // address to lend on; empty if this host lends nothing
	Cert, Key, CA string   // PEM files; if they are empty, connections have no TLS and only loopback addresses are allowed

	Deadline  time.Duration // longest wait of a lookup for leases
	Bandwidth int64         // most bytes a second that are sent, and as many that are read; 0 means no limit
	LeaseTime time.Duration // time of a lease that a local lookup takes; 0 means a minute
	// Budget is the longest time for one read; 0 means 12 s. It should be less than the limit for file operations, so that a
	// slow peer is not taken for a hanging file system.
	Budget time.Duration
	Memory int64  // most bytes that callers may make this host hold: see [Memory]
	NIXL   string // argument of [nixl.Open]; empty if all bytes go by gRPC
	Dry    bool   // New only checks that it could listen on Listen
	Log    *slog.Logger

	effort *arrivals.Effort // for tests; nil: that of [arrivals.NewEffort]
}

const (
	resolveEvery = time.Minute
	tidyEvery    = 250 * time.Millisecond
)

// Peers is this host's connection to all its peers: it borrows from them and lends to them. A nil *Peers is
// valid and has no peers. It is safe for concurrent use.
type Peers struct {
	cfg      Config
	id       *identity
	self     [16]byte
	fs       *FS
	table    Table
	usable   atomic.Uint64        // bitmap of the lists that Promise considers
	taker    atomic.Pointer[peer] // peer that gets the offers of entries evicted here, or nil
	turn     int                  // alternates between takers with the same turnover; used by tidy only
	patience time.Duration        // deadline of an offer
	of       [lists]atomic.Pointer[peer]
	store    *store.Store
	listener net.Listener // nil if this host lends nothing
	lending  *lending
	pause    time.Duration    // first pause of a peer that is left alone
	nixl     *nixlWay         // nil if all bytes go by gRPC
	reads    pace             // limits the bytes read from all peers
	effort   *arrivals.Effort // limits the processors' time for what each caller sends, and each called peer's list and frames of no call

	addresses atomic.Pointer[map[string]bool] // addresses of the configured hosts

	run  context.Context
	stop context.CancelFunc
	work sync.WaitGroup

	mu    sync.Mutex
	peers map[string]*peer // by address
	lost  map[string]error // configured names that do not resolve, with the reason
}

// New starts to listen. It does not connect to any peer: see [Peers.Start].
func New(cfg Config) (*Peers, error) {
	p := &Peers{cfg: cfg, peers: map[string]*peer{}, lost: map[string]error{}, pause: firstPause, patience: offerTime,
		reads: pace{rate: float64(cfg.Bandwidth)}, effort: cmp.Or(cfg.effort, arrivals.NewEffort())}
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

// Budgets returns the memory that this host holds for callers. It lists the callers with the largest amounts, at most the given number of them, in descending order.
func (p *Peers) Budgets(most int) []budget.Figures {
	if p == nil || p.lending == nil {
		return nil
	}
	return []budget.Figures{p.lending.memory.Figures(most)}
}

// Deadline returns the time within which all requests of one lookup must be answered.
func (p *Peers) Deadline() time.Duration { return p.cfg.Deadline }

// Addr returns the address on which this host lends. It is empty if the host lends nothing.
func (p *Peers) Addr() string {
	if p == nil || p.listener == nil {
		return ""
	}
	return p.listener.Addr().String()
}

// Root returns the configuration of the root for borrowed entries. Its level must be behind all others.
func (p *Peers) Root(level int) store.RootConfig {
	return store.RootConfig{Path: Path, Medium: store.Medium{FS: p.fs, Traits: store.Lent, Lender: p}, Capacity: Capacity,
		MaxEntries: MostEntries, Level: level, ForPieces: true}
}

// Start begins to lend the entries of a store, and to borrow for it.
func (p *Peers) Start(s *store.Store) {
	p.store = s
	if p.listener != nil {
		p.lending = newLending(p)
		p.work.Go(func() { p.lending.serve(p.listener) })
	}
	p.work.Go(func() { p.resolve() })
	p.work.Go(func() { p.tidy() })
}

// Close ends all goroutines. Fetches under way fail.
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

// CloseFiles frees the file system of the borrowed entries. The store must be closed.
func (p *Peers) CloseFiles() error {
	if p == nil {
		return nil
	}
	return p.fs.Close()
}

// resolve looks up the addresses of the configured hosts every resolveEvery.
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

// settle resolves the configured names once. It starts a peer for each new address and ends the peers of addresses that have
// disappeared. A name that does not resolve keeps its peers.
func (p *Peers) settle() {
	found, kept := map[string]string{}, map[string]bool{} // found: names by address; kept: names that keep their peers
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

// all returns the peers in the order of their addresses.
func (p *Peers) all() (list []*peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, at := range slices.Sorted(maps.Keys(p.peers)) {
		list = append(list, p.peers[at])
	}
	return list
}

// tidy returns unused loans, probes peers that were left alone, and chooses the taker of offers, every tidyEvery.
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

// service implements [proto.PeerServiceServer].
type service struct {
	proto.UnimplementedPeerServiceServer
	*lending
}

const (
	window    = 8 << 20
	ioBuffer  = 256 << 10
	mostKeys  = 1 << 16
	mostBytes = 4 << 20 // largest message
)

// dial returns a connection that is established on its first use.
func (p *Peers) dial(name, addr string) (*grpc.ClientConn, error) {
	host, _, err := net.SplitHostPort(name)
	if err != nil {
		return nil, err
	}
	return grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(called{p.id.calling(host), p, addr}), grpc.WithNoProxy(),
		grpc.WithKeepaliveParams(aliveParams), grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(2*window),
		grpc.WithReadBufferSize(ioBuffer), grpc.WithWriteBufferSize(ioBuffer), grpc.WithConnectParams(connectParams),
		grpc.WithMaxHeaderListSize(mostHeader), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(mostBytes)))
}
