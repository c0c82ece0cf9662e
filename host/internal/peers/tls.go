package peers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// identity is this host's certificate and who signs those of its peers: files, read again when one was renewed.
type identity struct {
	cert, key, ca string

	mu    sync.Mutex
	pair  *tls.Certificate
	pool  *x509.CertPool
	files [3]fs.FileInfo
	trust map[*x509.Certificate]*x509.CertPool // that has verified what is used
}

// mostTrust is how many certificates of connections are remembered as verified.
const mostTrust = 1 << 10

// newIdentity is nil without files: what is said then is not encrypted.
func newIdentity(cert, key, ca string) (*identity, error) {
	if cert == "" && key == "" && ca == "" {
		return nil, nil
	}
	id := &identity{cert: cert, key: key, ca: ca}
	return id, id.load()
}

func (id *identity) load() error {
	var now [3]fs.FileInfo
	same := id.pair != nil
	for i, name := range []string{id.cert, id.key, id.ca} {
		var err error
		if now[i], err = os.Stat(name); err != nil {
			return fmt.Errorf("%w: %w", ErrConfig, err)
		}
		was := id.files[i]
		same = same && os.SameFile(was, now[i]) && was.ModTime().Equal(now[i].ModTime())
	}
	if same {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(id.cert, id.key)
	if err != nil {
		return fmt.Errorf("%w: peers.cert, peers.key: %w", ErrConfig, err)
	}
	pem, err := os.ReadFile(id.ca)
	if err != nil {
		return fmt.Errorf("%w: peers.ca: %w", ErrConfig, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return fmt.Errorf("%w: peers.ca: %s has no certificate", ErrConfig, id.ca)
	}
	id.pair, id.pool, id.files, id.trust = &pair, pool, now, map[*x509.Certificate]*x509.CertPool{}
	return nil
}

// now is what counts at present. While a renewal is half written, the old files count.
func (id *identity) now() (*tls.Certificate, *x509.CertPool) {
	id.mu.Lock()
	defer id.mu.Unlock()
	_ = id.load()
	return id.pair, id.pool
}

// serving demands a certificate of who calls.
func (id *identity) serving() credentials.TransportCredentials {
	if id == nil {
		return insecure.NewCredentials()
	}
	return credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		pair, pool := id.now()
		return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*pair}, ClientAuth: tls.RequireAndVerifyClientCert,
			ClientCAs: pool, NextProtos: []string{"h2"}}, nil
	}})
}

// calling demands that a peer's certificate is for the name that the configuration has for it.
func (id *identity) calling(name string) credentials.TransportCredentials {
	if id == nil {
		return insecure.NewCredentials()
	}
	return credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: name,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, _ := id.now()
			return pair, nil
		},
		InsecureSkipVerify: true, // VerifyConnection verifies, with the authorities of the moment
		VerifyConnection: func(c tls.ConnectionState) error {
			return id.verify(c.PeerCertificates, name)
		},
	})
}

// verify verifies what the other side of a connection has shown, by the authorities of the moment. Connections last longer than those.
func (id *identity) verify(chain []*x509.Certificate, name string) error {
	_, pool := id.now()
	id.mu.Lock()
	known := id.trust[chain[0]] == pool
	id.mu.Unlock()
	if known {
		return nil
	}
	between := x509.NewCertPool()
	for _, cert := range chain[1:] {
		between.AddCert(cert)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{DNSName: name, Roots: pool, Intermediates: between,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}) // the handshake has looked at that
	if err == nil {
		id.mu.Lock()
		defer id.mu.Unlock()
		if len(id.trust) >= mostTrust {
			clear(id.trust)
		}
		id.trust[chain[0]] = pool
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
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			return info.State.PeerCertificates
		}
	}
	return nil
}
