package peers

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// identity holds this host's certificate and the authorities that sign the certificates of its peers.
type identity struct {
	*regular.Renewed[papers]

	mu    sync.Mutex
	trust map[shownAs]*x509.CertPool // the pool that verified each certificate; a certificate is verified again when the pool has been replaced
}

type papers struct {
	pair *tls.Certificate
	pool *x509.CertPool
}

// shownAs is a certificate together with the host name it must be valid for. An empty name accepts any. All connections that
// show the same certificate share one pointer to it.
type shownAs struct {
	cert *x509.Certificate
	name string
}

const (
	mostTrust = 1 << 10 // certificates that are remembered as verified
	// mostChain is the largest number of certificates in a chain. More of one name take a processor for tens of milliseconds, whoever
	// has signed them.
	mostChain = 4
)

// newIdentity loads the files. Without files it returns nil, and connections are not encrypted.
func newIdentity(cert, key, ca string, log *slog.Logger) (*identity, error) {
	if cert == "" && key == "" && ca == "" {
		return nil, nil
	}
	files, err := regular.Renew(func() (p papers, err error) {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return p, fmt.Errorf("%w: peers.cert, peers.key: %w", ErrConfig, err)
		}
		if len(pair.Certificate) > mostChain { // its peers would refuse it
			return p, fmt.Errorf("%w: peers.cert: %s has %d certificates, at most %d", ErrConfig, cert, len(pair.Certificate), mostChain)
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

// calling returns the credentials of a client. They demand that the server's certificate is valid for the configured name.
func (id *identity) calling(name string) credentials.TransportCredentials {
	if id == nil {
		return insecure.NewCredentials()
	}
	return credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: name,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return id.Now().pair, nil },
		InsecureSkipVerify:   true, // VerifyConnection verifies instead, with the authorities that are loaded now
		VerifyConnection:     func(c tls.ConnectionState) error { return id.verify(c.PeerCertificates, name) },
	})
}

// verify checks a certificate chain against the authorities that are loaded now. A connection can outlive the authorities with
// which its handshake was checked. The name is the server's host name. For a client's chain it is empty.
func (id *identity) verify(chain []*x509.Certificate, name string) error {
	if len(chain) > mostChain {
		return fmt.Errorf("%w: %d certificates, at most %d", ErrHandshake, len(chain), mostChain)
	}
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
		usage = x509.ExtKeyUsageClientAuth
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
