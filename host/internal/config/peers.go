package config

import (
	"net"
	"strings"
)

func (p *Peers) List() (list []string) {
	for h := range strings.SplitSeq(p.Hosts, ",") {
		if h = strings.TrimSpace(h); h != "" {
			list = append(list, h)
		}
	}
	return list
}

// On reports whether this host lends or borrows.
func (p *Peers) On() bool { return p.Listen != "" || p.Hosts != "" }

func (p *Peers) validate(bad func(wrong bool, path, format string, args ...any)) {
	set := 0
	for _, file := range []string{p.Cert, p.Key, p.CA} {
		if file != "" {
			set++
		}
	}
	bad(set != 0 && set != 3, "peers.cert",
		"peers.cert, peers.key and peers.ca belong together: want all three, or none for loopback addresses")
	remote, err := remoteAddress(p.Listen)
	switch {
	case err != nil:
		bad(true, "peers.listen", "%q: %v", p.Listen, err)
	case remote && set == 0:
		bad(true, "peers.listen", "%s is not loopback, so it needs peers.cert, peers.key and peers.ca", p.Listen)
	}
	for _, h := range p.List() {
		host, port, err := net.SplitHostPort(h)
		if ip := net.ParseIP(host); err != nil || host == "" || port == "" {
			bad(true, "peers.hosts", "%q: want host:port", h)
		} else if set == 0 && ip != nil && !ip.IsLoopback() {
			bad(true, "peers.hosts", "%s is not loopback, so it needs peers.cert, peers.key and peers.ca", h)
		}
	}
}
