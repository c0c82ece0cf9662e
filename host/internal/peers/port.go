package peers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/staging"
)

const (
	leastMemory = 16 << 20  // lower bound of [Memory]
	mostMemory  = 256 << 20 // upper bound of [Memory]
	lineBytes   = 160 << 10 // charge for an idle connection
	callBytes   = 16 << 10  // charge for a call
	streamBytes = 64 << 10  // additional charge for a stream of residents
	mostHeader  = 8 << 10   // largest header of a call, and of its answer
	callWindow  = 64 << 10  // most bytes of a call that may arrive before they are read
	lineWindow  = 1 << 20   // most bytes of a connection that may arrive before they are read
	lineBuffer  = 64 << 10  // read buffer of a connection, and its write buffer

	mostKnocks        = 64 // connections before the end of their handshake
	handshakeTime     = 5 * time.Second
	mostHandshake     = 16 << 10               // bytes of a caller before the end of its handshake
	handshakeEffort   = 300 * time.Microsecond // estimate for a connection's begin
	certificateEffort = 2 * time.Millisecond   // estimate for each certificate of its chain after the first
	byteEffort        = 2 * time.Nanosecond    // estimate for a byte of a message; keys and numbers are cheap to decode
)

// Memory returns the maximum number of bytes that callers may make this host hold, for a memory limit of the process.
func Memory(limit int64) int64 { return max(leastMemory, min(limit/8, mostMemory)) }

// port is where calls arrive. It charges callers for their connections and for other resources of this host.
type port struct {
	owner  *host
	shares shares
	memory *budget.Budget // memory of all connections
	room   staging.Signal // sent when a resource is returned

	tenants struct { // numbers of memory accounts, by caller id
		sync.Mutex
		of map[string]uint32
	}

	refused atomic.Uint64 // connections and requests
}

// door is the listener of the server. It limits the number of connections before the end of their handshake, and gRPC
// limits the time that the handshake takes.
type door struct {
	net.Listener
	port *port
}

// Accept implements [net.Listener].
func (d door) Accept() (net.Conn, error) {
	for {
		c, err := d.Listener.Accept()
		if err != nil {
			return nil, err
		}
		who := d.port.owner.callerAt(c.RemoteAddr(), nil)
		if d.port.shares.take(who, handshakes, 1) {
			return &knock{Conn: c, left: mostHandshake, pay: func(took time.Duration) { d.port.owner.effort.Spend(d.port.owner.run, who.sender(), took) },
				over: sync.OnceFunc(func() { d.port.shares.give(who, handshakes, 1) })}, nil
		}
		d.port.refused.Add(1)
		_ = c.Close() // an error has no consequence: the connection is refused anyway
	}
}

// knock is a connection before the end of its handshake.
type knock struct {
	net.Conn
	left int                 // bytes that may arrive until then; negative once it has ended
	pay  func(time.Duration) // waits until the caller has made up for an estimated time
	over func()
}

// Read implements [net.Conn].
func (k *knock) Read(p []byte) (int, error) {
	if k.left < 0 {
		return k.Conn.Read(p)
	} else if k.left == 0 {
		return 0, fmt.Errorf("%w: a handshake of more than %d bytes", ErrHandshake, mostHandshake)
	}
	n, err := k.Conn.Read(p[:min(len(p), k.left)])
	k.left -= n
	return n, err
}

// Close implements [net.Conn].
func (k *knock) Close() error {
	k.over()
	return k.Conn.Close()
}

// line is a connection after its handshake. It is charged to its caller.
type line struct {
	*arrivals.Conn
	credentials.AuthInfo
	who  caller
	over func()
}

// Close implements [net.Conn].
func (c *line) Close() error {
	c.over()
	return c.Conn.Close()
}

// atDoor performs the handshake that turns a [knock] into a [line].
type atDoor struct {
	credentials.TransportCredentials
	port *port
}

// ServerHandshake implements [credentials.TransportCredentials].
func (d atDoor) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if k, ok := raw.(*knock); ok {
		k.pay(handshakeEffort)
	}
	c, info, err := d.TransportCredentials.ServerHandshake(raw)
	if k, ok := raw.(*knock); ok {
		k.left = -1
		k.over()
	}
	if err != nil {
		return nil, nil, err
	}
	l, err := d.port.admitLine(c, info)
	if err != nil {
		d.port.refused.Add(1)
		return nil, nil, err
	}
	return l, l, nil
}

// Clone implements [credentials.TransportCredentials].
func (d atDoor) Clone() credentials.TransportCredentials {
	return atDoor{d.TransportCredentials.Clone(), d.port}
}

// admitLine charges a connection to its caller, or refuses it.
func (p *port) admitLine(c net.Conn, info credentials.AuthInfo) (*line, error) {
	who := p.owner.callerAt(c.RemoteAddr(), info)
	if !p.shares.take(who, lines, 1) {
		return nil, fmt.Errorf("%w: %s has as many connections as it may", ErrAway, who.id)
	}
	give := func() { p.shares.give(who, lines, 1); p.room.Send() }
	holder, err := p.memory.Join(who.id, p.tenant(who))
	if err == nil {
		if err = holder.Line(lineBytes); err != nil {
			holder.Leave()
		}
	}
	if err != nil {
		give()
		return nil, err
	}
	refused := func(err error) {
		p.refused.Add(1)
		p.owner.cfg.Log.Warn("a connection of a peer is closed: it takes more than its share", "peer", who.id, "error", err)
	}
	x := &line{arrivals.New(c, holder, callBytes, refused), info, who, sync.OnceFunc(func() { holder.LineOver(lineBytes); give() })}
	x.Pace(p.owner.effort, byteEffort, func() arrivals.Sender { return p.owner.callerOn(x, c.RemoteAddr()).sender() })
	return x, nil
}

// tenant returns the number under which a caller's memory is counted. Each configured host has its own number, and all other
// callers share 0.
func (p *port) tenant(who caller) uint32 {
	if !who.known {
		return 0
	}
	p.tenants.Lock()
	defer p.tenants.Unlock()
	if p.tenants.of[who.id] == 0 {
		p.tenants.of[who.id] = uint32(len(p.tenants.of)) + 1
	}
	return p.tenants.of[who.id]
}

// serving returns the credentials of the server, which demand a certificate from every client.
func (id *identity) serving() credentials.TransportCredentials {
	if id == nil {
		return insecure.NewCredentials()
	}
	return credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		p := id.Now()
		return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*p.pair}, ClientAuth: tls.RequireAnyClientCert,
			ClientCAs: p.pool, NextProtos: []string{"h2"}, VerifyConnection: func(c tls.ConnectionState) error {
				if k, ok := hello.Conn.(*knock); ok {
					k.pay(certificateEffort * time.Duration(min(mostChain, len(c.PeerCertificates))-1))
				}
				return id.verify(c.PeerCertificates, "")
			}}, nil
	}})
}

// admits refuses a call if the certificate of its connection is no longer trusted.
func (id *identity) admits(ctx context.Context) error {
	if chain := shown(ctx); id != nil && chain != nil {
		if err := id.verify(chain, ""); err != nil {
			return status.Error(codes.PermissionDenied, err.Error())
		}
	}
	return nil
}

// shown returns the certificate chain of the other side, or nil without TLS.
func shown(ctx context.Context) []*x509.Certificate {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		info := p.AuthInfo
		if l, ok := info.(*line); ok {
			info = l.AuthInfo
		}
		if info, ok := info.(credentials.TLSInfo); ok {
			return info.State.PeerCertificates
		}
	}
	return nil
}

// lineOf returns the connection of a call, or nil if it did not come through the listener.
func lineOf(ctx context.Context) *line {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		c, _ := p.AuthInfo.(*line)
		return c
	}
	return nil
}

func arrivalsOf(info credentials.AuthInfo) *arrivals.Conn {
	if c, ok := info.(*line); ok {
		return c.Conn
	}
	return nil
}

// callerOf returns the caller of a request.
func (h *host) callerOf(ctx context.Context) caller {
	c, ok := grpcpeer.FromContext(ctx)
	if !ok {
		return caller{}
	}
	if line := lineOf(ctx); line != nil {
		return h.callerOn(line, c.Addr)
	}
	return h.callerAt(c.Addr, c.AuthInfo)
}

// callerOn returns the caller of a connection. It may be known since the connection began.
func (h *host) callerOn(c *line, at net.Addr) caller {
	if c.who.known || !h.expects(hostOf(at.String())) {
		return c.who
	}
	return h.callerAt(at, c)
}

// await waits until a caller may take one of a resource. The counterpart is [port.back].
func (p *port) await(ctx context.Context, who caller, r resource) error {
	for room := p.room.Next(); !p.shares.take(who, r, 1); room = p.room.Next() {
		select {
		case <-room:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (p *port) back(who caller, r resource) {
	p.shares.give(who, r, 1)
	p.room.Send()
}
