package peers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// identity is this host's certificate and who signs those of its peers.
type identity struct {
	*regular.Renewed[papers]

	mu    sync.Mutex
	trust map[shownAs]*x509.CertPool // that has verified what is used
}

type papers struct {
	pair *tls.Certificate
	pool *x509.CertPool
}

// shownAs is a certificate, and the name that it was to be for; empty: any. All connections with a certificate have the same pointer to it.
type shownAs struct {
	cert *x509.Certificate
	name string
}

// mostTrust is how many certificates of connections are remembered as verified.
const mostTrust = 1 << 10

// newIdentity is nil without files: what is said then is not encrypted.
func newIdentity(cert, key, ca string, log *slog.Logger) (*identity, error) {
	if cert == "" && key == "" && ca == "" {
		return nil, nil
	}
	files, err := regular.Renew(func() (p papers, err error) {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return p, fmt.Errorf("%w: peers.cert, peers.key: %w", ErrConfig, err)
		}
		pem, err := os.ReadFile(ca)
		if err != nil {
			return p, fmt.Errorf("%w: peers.ca: %w", ErrConfig, err)
		}
		p.pair, p.pool = &pair, x509.NewCertPool()
		if !p.pool.AppendCertsFromPEM(pem) {
			return p, fmt.Errorf("%w: peers.ca: %s has no certificate", ErrConfig, ca)
		}
		return p, nil
	}, log, cert, key, ca)
	if err != nil && !errors.Is(err, ErrConfig) {
		err = fmt.Errorf("%w: peers.cert, peers.key, peers.ca: %w", ErrConfig, err)
	}
	return &identity{Renewed: files, trust: map[shownAs]*x509.CertPool{}}, err
}

// serving demands a certificate of who calls.
func (id *identity) serving() credentials.TransportCredentials {
	if id == nil {
		return insecure.NewCredentials()
	}
	return credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		p := id.Now()
		return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*p.pair}, ClientAuth: tls.RequireAndVerifyClientCert,
			ClientCAs: p.pool, NextProtos: []string{"h2"}}, nil
	}})
}

// calling demands that a peer's certificate is for the name that the configuration has for it.
func (id *identity) calling(name string) credentials.TransportCredentials {
	if id == nil {
		return insecure.NewCredentials()
	}
	return credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: name,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return id.Now().pair, nil },
		InsecureSkipVerify:   true, // VerifyConnection verifies, with the authorities of the moment
		VerifyConnection:     func(c tls.ConnectionState) error { return id.verify(c.PeerCertificates, name) },
	})
}

// verify verifies what the other side of a connection has shown, by the authorities of the moment. Connections last longer than those. The
// name is that of a server; empty: of a client, whose handshake has looked at the rest.
func (id *identity) verify(chain []*x509.Certificate, name string) error {
	pool, as := id.Now().pool, shownAs{chain[0], name}
	id.mu.Lock()
	known := id.trust[as] == pool && time.Now().Before(chain[0].NotAfter)
	id.mu.Unlock()
	if known {
		return nil
	}
	between := x509.NewCertPool()
	for _, cert := range chain[1:] {
		between.AddCert(cert)
	}
	usage := x509.ExtKeyUsageServerAuth
	if name == "" {
		usage = x509.ExtKeyUsageAny
	}
	_, err := chain[0].Verify(x509.VerifyOptions{DNSName: name, Roots: pool, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{usage}})
	if err == nil {
		id.mu.Lock()
		defer id.mu.Unlock()
		if len(id.trust) >= mostTrust {
			clear(id.trust)
		}
		id.trust[as] = pool
	}
	return err
}

// admits says whether a call comes from a host that is trusted still.
func (id *identity) admits(ctx context.Context) error {
	if chain := shown(ctx); id != nil && chain != nil {
		if err := id.verify(chain, ""); err != nil {
			return status.Error(codes.PermissionDenied, err.Error())
		}
	}
	return nil
}

// shown is what the other side of a connection has shown, nil without TLS.
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
