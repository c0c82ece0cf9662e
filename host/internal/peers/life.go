package peers

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
)

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
func (b *borrowing) who(x *peer, list int, host [16]byte) State {
	b.mu.Lock()
	defer b.mu.Unlock()
	state, said := Away, false
	for _, o := range b.peers {
		o.mu.Lock()
		if o != x && o.host == host && o.list < lists {
			if said = true; len(o.chain) == 0 || b.id.verify(o.chain, hostOf(x.name)) == nil {
				state = Twin
			}
		}
		o.mu.Unlock()
	}
	if host == b.self {
		state = Self
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.list, x.host, x.state = list, [16]byte{}, state
	if state == Away && !said {
		x.host = host
	} else if state == Away {
		b.cfg.Log.Warn("a peer says that it is the host of another, and has no certificate for that", "peer", x.addr)
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
		if client, err := x.client(false); err == nil {
			w.prove(x.run, &x.owner.work, x.agent(), client)
		}
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
