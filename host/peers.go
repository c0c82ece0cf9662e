package host

import (
	"log/slog"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/peers"
)

// openPeers is nil where the configuration has no peers.
func openPeers(c *config.Config, log *slog.Logger) (*peers.Peers, error) {
	p := &c.Peers
	if !p.On() {
		return nil, nil
	}
	budget := time.Duration(0)
	if limit := c.Store.IOTimeout; limit > 0 {
		budget = limit * 2 / 5
	}
	memory, _ := maxMemory(c)
	return peers.New(peers.Config{Hosts: p.List(), Listen: p.Listen, Cert: p.Cert, Key: p.Key, CA: p.CA, Deadline: p.Deadline,
		Bandwidth: p.Bandwidth, Demote: p.Demote, LeaseTime: c.Session.LeaseTTL, Budget: budget, NIXL: p.NIXL, Log: log,
		Memory: peers.Memory(memory)})
}

// PeerAddr is where this host lends; empty if it does not.
func (h *Host) PeerAddr() string { return h.peers.Addr() }
