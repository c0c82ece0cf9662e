package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/peers"
)

// openPeers opens the peers, if the configuration has any.
func (h *Host) openPeers(context.Context) (err error) {
	c := h.cfg
	p := &c.Peers
	if !p.On() {
		return nil
	}
	budget := time.Duration(0)
	if limit := c.Store.IOTimeout; limit > 0 {
		budget = limit * 2 / 5
	}
	h.peers, err = peers.New(peers.Config{Hosts: p.List(), Listen: p.Listen, Cert: p.Cert, Key: p.Key, CA: p.CA, Deadline: p.Deadline,
		Bandwidth: p.Bandwidth, LeaseTime: c.Session.LeaseTTL, Budget: budget, NIXL: p.NIXL, Log: h.log,
		Memory: peers.Memory(c.MaxMemory), Dry: h.found != nil})
	if errors.Is(err, peers.ErrListen) {
		err = fmt.Errorf("%w%s", err, observe.Holder(p.Listen, err))
	}
	return err
}

// PeerAddr returns the address on which this host lends. It is empty if the host does not lend.
func (h *Host) PeerAddr() string { return h.peers.Addr() }
