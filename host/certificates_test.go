package host_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/doctor"
)

// A certificate that is not valid, or not for long, is found by check. A start takes it: the file may be renewed at any time.
func TestCertificatesThatEnd(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		from, until time.Time
		level       doctor.Level
		says        string
	}{
		{now.Add(-48 * time.Hour), now.Add(-time.Hour), doctor.Problem, "has expired on "},
		{now.Add(time.Hour), now.Add(400 * 24 * time.Hour), doctor.Problem, "is valid from "},
		{now.Add(-time.Hour), now.Add(24 * time.Hour), doctor.Warning, "expires on "},
		{now.Add(-time.Hour), now.Add(400 * 24 * time.Hour), "", ""},
	} {
		cfg := configuration(t)
		dir := filepath.Dir(cfg.Socket)
		cfg.HTTP.Listen, cfg.HTTP.TLSCert, cfg.HTTP.TLSKey = "127.0.0.1:0", filepath.Join(dir, "cert"), filepath.Join(dir, "key")
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		testenv.OK(t, err)
		x := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: c.from, NotAfter: c.until}
		der, err := x509.CreateCertificate(rand.Reader, x, x, &key.PublicKey, key)
		testenv.OK(t, err)
		raw, err := x509.MarshalPKCS8PrivateKey(key)
		testenv.OK(t, err)
		testenv.OK(t, errors.Join(
			os.WriteFile(cfg.HTTP.TLSCert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
			os.WriteFile(cfg.HTTP.TLSKey, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600)))
		found := host.Check(t.Context(), host.Config{Config: cfg})
		i := slices.IndexFunc(found.Findings, func(f doctor.Finding) bool { return f.About == "http.tls_cert" })
		switch {
		case found.Refused != nil:
			t.Errorf("valid from %s to %s: check says that a host would not start: %v", c.from, c.until, found.Refused)
		case i < 0 && c.says != "" || i >= 0 && (found.Findings[i].Level != c.level || !strings.Contains(found.Findings[i].Says, c.says)):
			t.Errorf("valid from %s to %s: check finds %+v, want a %s that says %q", c.from, c.until, found.Findings, c.level, c.says)
		}
	}
}
