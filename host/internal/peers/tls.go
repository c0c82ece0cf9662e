package peers

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// identity is this host's certificate and who signs those of its peers: files, read again when one was renewed.
type identity struct {
	cert, key, ca string

	mu      sync.Mutex
	pair    *tls.Certificate
	pool    *x509.CertPool
	changed [3]time.Time
}

// newIdentity is nil without files: what is said then is not encrypted.
func newIdentity(cert, key, ca string) (*identity, error) {
	if cert == "" && key == "" && ca == "" {
		return nil, nil
	}
	id := &identity{cert: cert, key: key, ca: ca}
	return id, id.load()
}

func (id *identity) load() error {
	var now [3]time.Time
	for i, name := range []string{id.cert, id.key, id.ca} {
		if st, err := os.Stat(name); err == nil {
			now[i] = st.ModTime()
		}
	}
	if id.pair != nil && now == id.changed {
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
	id.pair, id.pool, id.changed = &pair, pool, now
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
			_, pool := id.now()
			between := x509.NewCertPool()
			for _, cert := range c.PeerCertificates[1:] {
				between.AddCert(cert)
			}
			_, err := c.PeerCertificates[0].Verify(x509.VerifyOptions{DNSName: name, Roots: pool, Intermediates: between})
			return err
		},
	})
}
