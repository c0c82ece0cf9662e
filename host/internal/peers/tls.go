package peers

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// identity is this host's certificate and who signs those of its peers.
type identity struct{ *regular.Renewed[papers] }

type papers struct {
	pair *tls.Certificate
	pool *x509.CertPool
}

// newIdentity is nil without files: what is said then is not encrypted.
func newIdentity(cert, key, ca string) (*identity, error) {
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
	}, cert, key, ca)
	return &identity{files}, err
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
		VerifyConnection: func(c tls.ConnectionState) error {
			between := x509.NewCertPool()
			for _, cert := range c.PeerCertificates[1:] {
				between.AddCert(cert)
			}
			_, err := c.PeerCertificates[0].Verify(x509.VerifyOptions{DNSName: name, Roots: id.Now().pool, Intermediates: between})
			return err
		},
	})
}
