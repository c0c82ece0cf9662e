package config

import (
	"errors"
	"fmt"
	"net"
	"strconv"
)

func (h *HTTP) validate(bad func(wrong bool, path, format string, args ...any)) {
	remote, err := remoteAddress(h.Listen)
	bad(err != nil, "http.listen", "%q: %v", h.Listen, err)
	bad((h.TLSCert == "") != (h.TLSKey == ""), "http.tls_cert", "a certificate needs http.tls_key, and the other way round")
	bad(h.Profiles && remote && h.TokenFile == "", "http.profiles",
		"profiles show the host's memory: %s is not loopback, so they need http.token_file", h.Listen)
}

// remoteAddress reports whether other machines can reach an address. The address must name its interface: an empty one
// stands for all interfaces, which is seldom intended.
func remoteAddress(address string) (bool, error) {
	if address == "" {
		return false, nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return false, errors.New("want host:port")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n > 65535 {
		return false, fmt.Errorf("port %q is not a number from 0 to 65535", port)
	}
	if host == "localhost" {
		return false, nil
	}
	ip := net.ParseIP(host)
	if ip == nil {
		return false, errors.New("want an IP address or localhost before the port; 0.0.0.0 or [::] for every interface")
	}
	return !ip.IsLoopback(), nil
}
