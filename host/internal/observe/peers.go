package observe

import "github.com/kvhost/kvhost/host/internal/peers"

// peerMetrics have one series per peer.
var peerMetrics = rows[peers.Stats]{
	{"peer_here", "1 while the peer is asked.", gauge, func(s *peers.Stats) float64 { return boolean(s.State == peers.Here) }},
	{"peer_entries", "Entries that the peer says it has.", gauge, func(s *peers.Stats) float64 { return float64(s.Entries) }},
	{"peer_heard_seconds", "Time since the peer last told a change.", gauge, func(s *peers.Stats) float64 { return s.Heard.Seconds() }},
	{"peer_asks_total", "Leases that the peer was asked for.", counter, func(s *peers.Stats) float64 { return float64(s.Asks) }},
	{"peer_ask_seconds_total", "Time of these asks.", counter, func(s *peers.Stats) float64 { return s.Waited.Seconds() }},
	{"peer_failures_total", "Asks and reads without an answer in time.", counter, func(s *peers.Stats) float64 { return float64(s.Failures) }},
	{"peer_asked_keys_total", "Keys asked for.", counter, func(s *peers.Stats) float64 { return float64(s.Keys) }},
	{"peer_struck_keys_total", "Keys among them that the peer had promised and did not lend.", counter,
		func(s *peers.Stats) float64 { return float64(s.Struck) }},
	{"peer_read_bytes_total", "Bytes of pieces read from the peer.", counter, func(s *peers.Stats) float64 { return float64(s.Bytes) }},
	{"peer_nixl", "1 while the peer is read by NIXL.", gauge, func(s *peers.Stats) float64 { return boolean(s.NIXL) }},
	{"peer_nixl_bytes_total", "Bytes among them that came by NIXL.", counter, func(s *peers.Stats) float64 { return float64(s.NIXLBytes) }},
	{"peer_nixl_fallbacks_total", "Reads that went by gRPC though both hosts have NIXL.", counter,
		func(s *peers.Stats) float64 { return float64(s.NIXLFallbacks) }},
	{"peer_turnover_seconds", "How long the peer takes to replace what it holds, as it says; 0: it takes no offers.", gauge,
		func(s *peers.Stats) float64 { return s.Turnover.Seconds() }},
	{"peer_offers_total", "Entries evicted here that the peer was offered.", counter, func(s *peers.Stats) float64 { return float64(s.Offers) }},
	{"peer_offers_taken_total", "Offers that the peer has taken.", counter, func(s *peers.Stats) float64 { return float64(s.Taken) }},
	{"peer_blamed_total", "Pieces that were not what they should be.", counter, func(s *peers.Stats) float64 { return float64(s.Blamed) }},
}

// What this host lends, and what it keeps of its peers.
var (
	peerFamilies = peerMetrics.families("peer")
	lentLeases   = gauged("lent_leases", "Leases that peers have of this host.", "")
	lentKeys     = counted("lent_keys_total", "Keys lent to peers.", "")
	lentBytes    = counted("lent_bytes_total", "Bytes of pieces sent to peers.", "")
	lentNIXL     = counted("lent_nixl_bytes_total", "Bytes among them that peers may have read by NIXL.", "")
	lentRefused  = counted("lent_refused_total", "Leases refused to peers.", "")
	offersTaken  = counted("offers_taken_total", "Offers of peers that this host has taken.", "")
	offersNot    = counted("offers_declined_total", "Offers of peers that it has not taken.", "")
	peerMemory   = gauged("peer_table_bytes", "Memory of the fingerprints that peers have told.", "")
	peerDropped  = counted("peer_table_dropped_total", "Fingerprints that there was no memory for.", "")
)

func collectPeers(out series, p *peers.Peers) {
	if p == nil {
		return
	}
	list := p.Stats()
	for i := range list {
		at := list[i].Address
		if at == "" {
			at = list[i].Name
		}
		peerMetrics.put(out, peerFamilies, &list[i], at)
	}
	l := p.Lent()
	out.put(lentLeases, float64(l.Held))
	out.put(lentKeys, float64(l.Keys))
	out.put(lentBytes, float64(l.Bytes))
	out.put(lentNIXL, float64(l.NIXLBytes))
	out.put(lentRefused, float64(l.Refused))
	out.put(offersTaken, float64(l.Took))
	out.put(offersNot, float64(l.Declined))
	bytes, dropped := p.Table()
	out.put(peerMemory, float64(bytes))
	out.put(peerDropped, float64(dropped))
}
