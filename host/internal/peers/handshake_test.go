package peers

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
)

// signedBy is a chain of certificates, each signed by the next, and the last by an authority, which is written to a file.
func signedBy(t *testing.T, length, names int) (chain tls.Certificate, ca string) {
	t.Helper()
	key := func() *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		testenv.OK(t, err)
		return k
	}
	of := func(n int) *x509.Certificate {
		return &x509.Certificate{SerialNumber: big.NewInt(int64(n) + 1), Subject: pkix.Name{CommonName: fmt.Sprint(n)}, NotBefore: time.Now().Add(-time.Hour),
			NotAfter: time.Now().Add(time.Hour), IsCA: n > 0, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}}
	}
	by, signer := of(length), key()
	der, err := x509.CreateCertificate(rand.Reader, by, by, &signer.PublicKey, signer)
	testenv.OK(t, err)
	ca = filepath.Join(t.TempDir(), "ca")
	testenv.OK(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	for n := length - 1; n >= 0; n-- {
		c, k := of(n), key()
		for range names {
			c.DNSNames = append(c.DNSNames, strings.Repeat("x", 60))
		}
		der, err := x509.CreateCertificate(rand.Reader, c, by, &k.PublicKey, signer)
		testenv.OK(t, err)
		chain.Certificate, chain.PrivateKey = append([][]byte{der}, chain.Certificate...), k
		by, signer = c, k
	}
	return chain, ca
}

// filed writes a certificate and its key to files.
func filed(t *testing.T, c tls.Certificate) (cert, key string) {
	t.Helper()
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	raw, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	testenv.OK(t, err)
	testenv.OK(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600))
	var text []byte
	for _, der := range c.Certificate {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	testenv.OK(t, os.WriteFile(cert, text, 0o600))
	return cert, key
}

// TestLongHandshakes: a caller that sends more certificates or bytes than any host does is refused before they are verified, though its
// certificates are good. A chain makes its caller wait by its length.
func TestLongHandshakes(t *testing.T) {
	for what, c := range map[string]struct {
		length, names int
		taken         bool
	}{
		"one":          {1, 0, true},
		"four":         {mostChain, 0, true},
		"five":         {mostChain + 1, 0, false},
		"a large one":  {1, 100, true},
		"a huge one":   {1, 2 * mostHandshake / 64, false},
		"one in a lot": {mostChain, mostHandshake / 64 / 2, false},
	} {
		t.Run(what, func(t *testing.T) {
			chain, ca := signedBy(t, c.length, c.names)
			own := chain
			own.Certificate = chain.Certificate[:min(mostChain, c.length)]
			cert, key := filed(t, own)
			l := newLenderWith(t, Config{Cert: cert, Key: key, CA: ca, effort: &arrivals.Effort{Part: 0.05}})
			since := time.Now()
			line, err := tls.Dial("tcp", l.peers.Addr(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{chain}})
			if err == nil { // of TLS 1.3, the client learns of its refusal when it reads
				_, err = line.Read(make([]byte, 1))
				_ = line.Close() // the host may have closed it
			}
			if (err == nil) != c.taken {
				t.Errorf("%v, want that it is taken: %t", err, c.taken)
			}
			least := 20 * (handshakeEffort + time.Duration(c.length-1)*certificateEffort)
			if d := time.Since(since); c.taken && d < least {
				t.Errorf("a handshake with %d certificates has taken %s, want at least the %s that it waits", c.length, d, least)
			}
		})
	}
}

// TestLongChainIsNoConfiguration: a host does not start with a chain that its peers would refuse.
func TestLongChainIsNoConfiguration(t *testing.T) {
	for length, want := range map[int]error{mostChain: nil, mostChain + 1: ErrConfig} {
		chain, ca := signedBy(t, length, 0)
		cert, key := filed(t, chain)
		if _, err := newIdentity(cert, key, ca, slog.New(slog.DiscardHandler)); !errors.Is(err, want) {
			t.Errorf("%d certificates: %v, want %v", length, err, want)
		}
	}
}
