// Package certificates makes the certificates of tests.
package certificates

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// Authority signs certificates.
type Authority struct {
	Certificate *x509.Certificate // its own
	PEM         []byte            // the same
	key         *ecdsa.PrivateKey
}

// New is an authority that has signed its own certificate.
func New(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{Certificate: &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}}
	var der []byte
	a.key, der = a.sign(t, a.Certificate)
	var err error
	a.Certificate, err = x509.ParseCertificate(der)
	testenv.OK(t, err)
	a.PEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a
}

// sign signs a certificate for a new key, valid for a day unless it says otherwise.
func (a *Authority) sign(t testing.TB, c *x509.Certificate) (*ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	testenv.OK(t, err)
	now := time.Now()
	c.Subject = pkix.Name{CommonName: "test"}
	if c.SerialNumber == nil {
		c.SerialNumber = big.NewInt(now.UnixNano())
	}
	if c.NotAfter.IsZero() {
		c.NotBefore, c.NotAfter = now.Add(-time.Hour), now.Add(24*time.Hour)
	}
	by := a.key
	if by == nil {
		by = key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.Certificate, &key.PublicKey, by)
	testenv.OK(t, err)
	return key, der
}

// Pair writes a certificate of both sides of a connection, for a host's name or address, and its key to files. What else it says is in c.
func (a *Authority) Pair(t testing.TB, cert, key, name string, c x509.Certificate) {
	t.Helper()
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	if ip := net.ParseIP(name); ip != nil {
		c.IPAddresses = []net.IP{ip}
	} else {
		c.DNSNames = []string{name}
	}
	k, der := a.sign(t, &c)
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	testenv.OK(t, err)
	testenv.OK(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	testenv.OK(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600))
}
