package peers

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
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
	mostKeys  = 1 << 16                // keys of a request
	mostBytes = 4 << 20                // largest message
	tidyEvery = 250 * time.Millisecond // interval of the ends of leases and loans
)

// host is the part of this host that both borrowing and lending use.
type host struct {
	cfg    Config
	id     *identity
	self   [16]byte // a new one at each start
	store  *store.Store
	nixl   *nixlWay         // nil if all bytes go by gRPC
	effort *arrivals.Effort // limits the processors' time for what each caller sends, and each called peer's list and frames of no call

	addresses atomic.Pointer[map[string]bool] // addresses of the configured hosts

	run  context.Context
	stop context.CancelFunc
	work sync.WaitGroup
}

func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return err == nil && ip != nil && ip.IsLoopback()
}

// expects reports whether an address belongs to a configured host.
func (h *host) expects(address string) bool {
	known := h.addresses.Load()
	return known != nil && (*known)[address]
}

// callerAt identifies the owner of a connection by its address and by its certificate, if it has shown one.
func (h *host) callerAt(at net.Addr, info credentials.AuthInfo) caller {
	address := hostOf(at.String())
	if h.expects(address) {
		return caller{address, true}
	}
	tls, ok := info.(credentials.TLSInfo)
	if !ok || len(tls.State.PeerCertificates) == 0 {
		return caller{address, false}
	}
	cert := tls.State.PeerCertificates[0]
	sum := sha256.Sum256(cert.Raw)
	who := caller{id: "certificate " + hex.EncodeToString(sum[:8])}
	for _, name := range h.cfg.Hosts { // the host is configured, but its calls come from another address, as through a router
		if name, _, err := net.SplitHostPort(name); err == nil && cert.VerifyHostname(name) == nil {
			who.known = true
		}
	}
	return who
}
