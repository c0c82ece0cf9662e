package peers

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

const resolveEvery = time.Minute

// Peers is this host's connection to all its peers: it borrows from them and lends to them. A nil *Peers is
// valid and has no peers. It is safe for concurrent use.
type Peers struct {
	borrowing
	offers
	lending  *lending     // nil until Start, and if this host lends nothing
	listener net.Listener // nil if this host lends nothing
	fs       *FS

	lost map[string]error // configured names that do not resolve, with the reason; guarded by the lock of the peers
}

// New starts to listen. It does not connect to any peer: see [Peers.Start].
func New(cfg Config) (*Peers, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.LeaseTime, cfg.Budget = cmp.Or(cfg.LeaseTime, time.Minute), cmp.Or(cfg.Budget, 12*time.Second)
	h := &host{cfg: cfg, effort: cmp.Or(cfg.effort, arrivals.NewEffort())}
	if _, err := rand.Read(h.self[:]); err != nil {
		return nil, err
	}
	var err error
	if h.id, err = newIdentity(cfg.Cert, cfg.Key, cfg.CA, cfg.Log); err != nil {
		return nil, err
	}
	p := &Peers{borrowing: borrowing{host: h, peers: map[string]*peer{}, pause: firstPause, reads: pace{rate: float64(cfg.Bandwidth)}},
		lost: map[string]error{}}
	if p.fs, err = newFS(); err != nil {
		return nil, err
	}
	p.offers = offers{from: &p.borrowing, fs: p.fs, patience: offerTime}
	h.run, h.stop = context.WithCancel(context.Background())
	if cfg.NIXL != "" {
		var err error
		if h.nixl, err = newWay(cfg.NIXL, h.self, cfg.Log); err != nil {
			cfg.Log.Warn("peers are read by gRPC alone", "setting", "peers.nixl", "error", err)
		}
	}
	if cfg.Listen != "" {
		if p.listener, err = net.Listen("tcp", cfg.Listen); err != nil {
			err = fmt.Errorf("%w: %w", ErrListen, err)
		} else if h.id == nil && !isLoopback(p.listener.Addr().String()) {
			err = errors.Join(fmt.Errorf("%w: %w: peers.listen %s", ErrConfig, ErrPlaintext, cfg.Listen), p.listener.Close())
		}
		if err == nil && cfg.Dry {
			err, p.listener = p.listener.Close(), nil
		}
		if err != nil {
			return nil, errors.Join(err, h.nixl.close(), p.fs.Close())
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
		p.lending = newLending(p.host)
		p.offers.to = p.lending
		proto.RegisterPeerServiceServer(p.lending.grpc, service{p.lending, &p.offers})
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
			x := newPeer(&p.borrowing, name, at)
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
			p.choose(list)
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

// service implements [proto.PeerServiceServer].
type service struct {
	*lending
	offers *offers
}

// Offer implements [proto.PeerServiceServer].
func (s service) Offer(ctx context.Context, q *proto.OfferRequest) (*proto.OfferResponse, error) {
	return s.offers.take(ctx, q)
}

// Pinners returns the registrations for memory that holds pieces or receives them. It is empty without NIXL. They never return
// an error for a registration.
func (p *Peers) Pinners() []staging.Pinner {
	if p == nil || p.nixl == nil {
		return nil
	}
	return []staging.Pinner{pinner{p.nixl}}
}
