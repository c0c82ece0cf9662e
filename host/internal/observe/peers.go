package observe

import (
	"cmp"

	"github.com/kvhost/kvhost/host/internal/peers"
)

var ofPeer = of[peers.Stats]("peer",
	figure{"Entries", "peer_entries", "entries", "Entries that the peer says it has."},
	figure{from: "Heard", status: "heard"},
	figure{"Asks", "peer_asks_total", "asks", "Leases that the peer was asked for."},
	figure{"Failures", "peer_failures_total", "failures", "Asks and reads without an answer in time."},
	figure{from: "Keys", status: "keys"},
	figure{"Struck", "peer_struck_keys_total", "struck", "Keys asked for that the peer had promised and did not lend."},
	figure{"Bytes", "peer_read_bytes_total", "bytes", "Bytes of pieces read from the peer."},
	figure{"NIXL", "peer_nixl", "nixl", "1 while the peer is read by NIXL."},
	figure{"NIXLBytes", "peer_nixl_bytes_total", "nixl_bytes", "Bytes read from the peer by NIXL."},
	figure{from: "NIXLFallbacks", status: "nixl_fallbacks"},
	figure{from: "Turnover", status: "turnover"},
	figure{from: "Offers", status: "offers"},
	figure{from: "Taken", status: "taken"},
	figure{"Blamed", "peer_blamed_total", "blamed", "Pieces that were not what they should be."},
)

// ofLent has the figures of this host's loans to others.
var ofLent = of[peers.Lent]("",
	figure{"Bytes", "lent_bytes_total", "", "Bytes of pieces sent to peers."},
	figure{"NIXLBytes", "lent_nixl_bytes_total", "", "Bytes among them that peers may have read by NIXL."},
	figure{"Refused", "lent_refused_total", "", "Leases refused to peers."},
)

var (
	peerHere    = newFamily("peer_here", "1 while the peer is asked.", "peer")
	peerDropped = newFamily("peer_table_dropped_total", "Fingerprints of peers' entries that there was no memory for.", "")
)

func collectPeers(out series, p *peers.Peers) {
	if p == nil {
		return
	}
	for _, s := range p.Stats() {
		at := cmp.Or(s.Address, s.Name)
		ofPeer.put(out, &s, at)
		out.put(peerHere, boolean(s.State == peers.Here), at)
	}
	l := p.Lent()
	ofLent.put(out, &l)
	_, dropped := p.Table()
	out.put(peerDropped, float64(dropped))
}
